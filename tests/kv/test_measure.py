from dsuf.kv.measure import measure_paths


def test_paths_keep_up_with_a_plain_socket_and_a_plain_copy():
    # The ratios are set for an idle machine (tcp 0.8, shm 0.7); here others may take the cores for a while.
    for _ in range(8):
        rates = measure_paths(64 << 20, 113_920, rounds=4)
        shares = rates["tcp"] / rates["raw_socket"], rates["shm"] / rates["memcpy"]
        if shares[0] >= 0.8 and shares[1] >= 0.7:
            return
    raise AssertionError(f"tcp reaches {shares[0]:.2f} of a plain socket, shm {shares[1]:.2f} of a plain copy")
