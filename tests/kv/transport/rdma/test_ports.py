import pytest

from dsuf.kv.transport.rdma import ports

IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
IPV6 = "fd00:0001:0000:0000:0000:0000:0000:0007"
LOCAL = "fe80:0000:0000:0000:5054:00ff:fe00:0001"
OTHER_NAMESPACE = ports.NO_GID


def test_a_kernel_without_infiniband_has_no_ports(tmp_path):
    assert ports.find(root=tmp_path) == ([], [])


def test_an_ipv4_address_of_roce_v2_is_taken_before_v6_and_link_local_wherever_it_stands(machine):
    table = [
        (LOCAL, "IB/RoCE v1"),
        (LOCAL, "RoCE v2"),
        (OTHER_NAMESPACE, ""),
        (IPV4, "IB/RoCE v1"),
        (IPV6, "RoCE v2"),
        (IPV4, "RoCE v2"),
    ]
    [port], reasons = machine.port("mlx5_0", table, numa=1).find()
    assert reasons == []
    assert [(gid.kind, gid.index) for gid in port.gids] == [("roce-ipv4", 5), ("roce-ipv6", 4), ("roce-link-local", 1)]
    assert (port.name, port.gbps, port.numa_node, port.netdev) == ("mlx5_0:1", 400, 1, "eth7")


def test_of_two_addresses_of_a_kind_the_first_is_taken(machine):
    [port], _ = machine.port("mlx5_0", [(IPV4, "RoCE v2"), (IPV4[:-1] + "2", "RoCE v2")]).find()
    assert port.gids == (ports.Gid("roce-ipv4", 0, IPV4),)


def test_a_machine_with_ipv6_only_is_usable(machine):
    [port], _ = machine.port("mlx5_0", [(LOCAL, "RoCE v2"), (IPV6, "RoCE v2")]).find()
    assert port.gids[0] == ports.Gid("roce-ipv6", 1, IPV6)


def test_the_addresses_of_a_pod_may_start_at_any_index(machine):
    zeros = [(OTHER_NAMESPACE, "")] * 4
    [port], _ = machine.port("mlx5_0", [*zeros, (LOCAL, "IB/RoCE v1"), (LOCAL, "RoCE v2"), (IPV4, "RoCE v2")]).find()
    assert port.gids[0].index == 6


def test_a_pod_on_an_overlay_network_is_told_about_namespaces(machine):
    usable, [reason] = machine.port("mlx5_0", [(OTHER_NAMESPACE, "")] * 8).find()
    assert usable == [] and "network namespace" in reason and reason.startswith("mlx5_0:1 ")


def test_roce_v1_alone_is_not_usable(machine):
    usable, [reason] = machine.port("mlx4_0", [(LOCAL, "IB/RoCE v1")]).find()
    assert usable == [] and "RoCE v1" in reason


def test_infiniband_takes_index_0_and_the_lid(machine):
    gid = "fe80:0000:0000:0000:0002:c903:00aa:bb01"
    [port], _ = machine.port("mlx5_0", [(gid, "IB/RoCE v1")], layer="InfiniBand", lid="0x1f").find()
    assert port.gids == (ports.Gid("ib", 0, gid),) and port.lid == 31


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", ""])
def test_a_port_that_is_not_active_is_named_with_its_state(machine, state):
    usable, [reason] = machine.port("mlx5_0", [(IPV4, "RoCE v2")], state=state).find()
    assert usable == [] and (state[3:] or "no known state") in reason


def test_a_container_that_was_not_given_the_device_is_told_so(machine):
    usable, [reason] = machine.port("mlx5_0", [(IPV4, "RoCE v2")], node=False).find()
    assert usable == [] and "/dev/infiniband" in reason


def test_the_fastest_port_comes_first_and_numbers_sort_as_numbers(machine):
    for device, rate in (("mlx5_10", "200"), ("mlx5_2", "200"), ("mlx5_11", "400"), ("rxe0", "2.5")):
        machine.port(device, [(IPV4, "RoCE v2")], rate=f"{rate} Gb/sec (4X HDR)")
    usable, _ = machine.find()
    assert [port.name for port in usable] == ["mlx5_11:1", "mlx5_2:1", "mlx5_10:1", "rxe0:1"]


def test_both_ports_of_a_device_are_found_and_an_unreadable_rate_comes_last(machine):
    machine.port("mlx5_0", [(IPV4, "RoCE v2")], rate="unknown").port("mlx5_0", [(IPV6, "RoCE v2")], number=2)
    usable, _ = machine.find()
    assert [(port.name, port.gbps) for port in usable] == [("mlx5_0:2", 400), ("mlx5_0:1", 0)]


def test_named_ports_and_devices_are_the_only_ones_and_missing_ones_are_reasons(machine):
    for device in ("mlx5_0", "mlx5_1", "mlx5_2"):
        machine.port(device, [(IPV4, "RoCE v2")]).port(device, [(IPV4, "RoCE v2")], number=2)
    usable, reasons = machine.find("mlx5_0:2", "mlx5_2", "mlx5_7", "mlx5_1:3")
    assert [port.name for port in usable] == ["mlx5_0:2", "mlx5_2:1", "mlx5_2:2"]
    assert reasons == ["mlx5_7 is not on this machine", "mlx5_1:3 is not on this machine"]
