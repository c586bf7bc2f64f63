import pytest

from dsuf.kv.transport.base import TransferFailed
from dsuf.kv.transport.rdma.messages import Connect, Hello, Offer, OfferedPort, Open, decode, encode, pair_ports


def port(name, *kinds):
    return OfferedPort(name, list(kinds), 400)


def paired(own, theirs):
    return [(ours.name, other.name, kind) for ours, other, kind in pair_ports(own, theirs)]


def test_ports_are_paired_in_order_and_used_once():
    own = [port("a0", "roce-ipv4"), port("a1", "roce-ipv4"), port("a2", "roce-ipv4")]
    theirs = [port("b0", "roce-ipv4"), port("b1", "roce-ipv4")]
    assert paired(own, theirs) == [("a0", "b0", "roce-ipv4"), ("a1", "b1", "roce-ipv4")]


def test_only_ports_with_a_kind_of_address_in_common_are_paired():
    own = [port("a0", "ib"), port("a1", "roce-ipv4", "roce-ipv6")]
    theirs = [port("b0", "roce-ipv6", "roce-link-local"), port("b1", "ib")]
    assert paired(own, theirs) == [("a0", "b1", "ib"), ("a1", "b0", "roce-ipv6")]
    assert paired([port("a0", "ib")], [port("b0", "roce-ipv4")]) == []


def test_messages_travel_whole_and_tell_their_kind():
    hello = Hello("roce-ipv4", "0000:0000:0000:0000:0000:ffff:0a00:0001", 0, 17, 99, 5, 16)
    for message in (Connect([("rxe0:1", hello)], [3]), Open(4, 5)):
        assert decode(encode(message), Connect | Open) == message


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(Open(1, 2)), encode(Offer(1, []))[:-1]])
def test_what_is_no_such_message_fails_the_transfer(body):
    with pytest.raises(TransferFailed, match="cannot be read"):
        decode(body, Offer)
