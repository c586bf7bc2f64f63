"""Typed inline-PTX operations by group, as data: signature, text, chips, and a twin that says what they do on a CPU."""
