"""Where the text of an answer ends when a stop string is complete."""

from hypothesis import given
from hypothesis import strategies as st

from dsuf.text.events import StopText, used_before_stop

TEXT = st.text("ab é中", max_size=12)


@given(st.lists(st.binary(min_size=1, max_size=3) | TEXT.map(str.encode).filter(len), max_size=20), st.data())
def test_what_is_used_of_the_tokens_is_what_the_client_got(tokens, data):
    stops = tuple(data.draw(st.lists(TEXT.filter(len), min_size=1, max_size=3)))
    stream, given_out = StopText(stops), ""
    for read, token in enumerate(tokens, 1):
        given_out += stream.feed(token)
        if stream.stopped:
            used, rest = used_before_stop(tokens[:read], stops)
            assert used < read
            assert (b"".join(tokens[:used]) + rest).decode(errors="replace") == given_out
            break


def test_a_token_that_holds_the_end_of_a_character_and_the_stop_string():
    crown = ["👑".encode()[:3], "👑".encode()[3:] + b"\n\n"]
    assert used_before_stop([b"hi ", *crown], ["\n\n"]) == (1, "👑".encode())
    assert used_before_stop([b"hi ", *crown], ["\n"]) == (1, "👑".encode())
    assert used_before_stop([b"hi", b" the", b"re"], ["there"]) == (1, b" ")
    assert used_before_stop([b"\x91\n\n"], ["\n"]) == (0, b"\x91")
