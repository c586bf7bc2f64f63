import logging
import resource
import subprocess
import sys

import pytest

from dsuf.kv.arena import Arena
from dsuf.kv.transport.base import TransportUnavailable
from dsuf.kv.transport.rdma import RdmaTransport, transport, verbs
from dsuf.kv.transport.rdma.describe import describe

MODULES = ("addr", "cq", "device", "mr", "pd", "qp", "wr")


@pytest.fixture
def pyverbs(tmp_path, monkeypatch):
    """Puts a package of that name, with what its modules do when they are imported, before any other."""

    def install(on_import="", enums="enums"):
        folder = tmp_path / "pyverbs"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        for name in (*MODULES, enums):
            (folder / f"{name}.py").write_text(on_import if name == "addr" else "")
        (folder / "pyverbs_error.py").write_text("class PyverbsError(Exception): pass\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    verbs.load.cache_clear()
    yield install
    verbs.load.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        del sys.modules[name]


def test_importing_the_transport_does_not_import_pyverbs():
    code = "import sys, dsuf.kv.transport.rdma; sys.exit('pyverbs' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("enums", ["enums", "libibverbs_enums"])
def test_loading_leaves_the_root_logger_alone(pyverbs, enums):
    pyverbs("import logging; logging.basicConfig(level=logging.INFO, force=True)", enums)
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    assert verbs.load().enums.__name__ == f"pyverbs.{enums}"
    assert (root.level, root.handlers) == before


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("/x/libibverbs.so.1: version `IBVERBS_PRIVATE_59' not found", "another libibverbs"),
        ("libibverbs.so.1: cannot open shared object file: No such file or directory", "a library is missing"),
        ("undefined symbol: PyCode_New", "does not fit this Python"),
    ],
)
def test_each_way_in_which_pyverbs_does_not_load_has_its_own_words(pyverbs, raised, said):
    pyverbs(f"raise ImportError({raised!r})")
    with pytest.raises(TransportUnavailable, match=said) as caught:
        verbs.load()
    assert raised in str(caught.value)


def test_pyverbs_of_another_python_version_is_not_taken_for_absent(pyverbs, tmp_path):
    pyverbs()
    (tmp_path / "pyverbs/addr.py").unlink()  # only compiled modules of another version are there
    with pytest.raises(TransportUnavailable, match="same minor version"):
        verbs.load()


def test_without_pyverbs_the_message_is_what_to_run(pyverbs, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(TransportUnavailable, match=r"apt-get install python3-pyverbs.*ln -s .*site-packages"):
        verbs.load()


def limits(monkeypatch, soft, hard, capability=False):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: raised.append(values))
    monkeypatch.setattr(verbs, "may_lock_any", lambda: capability)
    return raised


def test_too_little_lockable_memory_is_said_with_what_to_set(monkeypatch):
    limits(monkeypatch, 8 << 20, 8 << 20)
    problem = verbs.locked_memory_problem(64 << 20)
    assert "8388608" in problem and "67108864" in problem and "IPC_LOCK" in problem and "ulimit -l" in problem


def test_the_limit_is_raised_as_far_as_allowed(monkeypatch):
    raised = limits(monkeypatch, 8 << 20, resource.RLIM_INFINITY)
    assert verbs.locked_memory_problem(64 << 20) is None
    assert raised == [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(("soft", "capability"), [(64 << 20, False), (resource.RLIM_INFINITY, False), (8, True)])
def test_enough_lockable_memory_changes_nothing(monkeypatch, soft, capability):
    raised = limits(monkeypatch, soft, soft, capability)
    assert verbs.locked_memory_problem(64 << 20) is None and raised == []


def test_a_machine_without_rdma_is_told_so_before_anything_else(monkeypatch):
    monkeypatch.setattr(transport, "find", lambda wanted: ([], []))
    arena = Arena(4096, 4096, 128)
    with pytest.raises(TransportUnavailable, match="no RDMA device"):
        RdmaTransport.open(arena)
    arena.close()


def test_a_machine_without_rdma_has_one_fact_and_nothing_to_mend(tmp_path):
    [fact] = describe(tmp_path)
    assert "no RDMA device" in fact.text and fact.fix == ""


def test_ports_library_and_lockable_memory_are_described(machine, pyverbs, monkeypatch):
    pyverbs()
    machine.port("mlx5_0", [("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")]).port("mlx5_1", [], state="1: DOWN")
    limits(monkeypatch, 8 << 20, 8 << 20)
    facts = describe(machine.root)
    assert [bool(fact.fix) for fact in facts] == [False, True, False, True]
    assert "mlx5_0:1 (roce-ipv4, 400 Gb/s)" in facts[0].text and "mlx5_1:1 is DOWN" in facts[1].text
    assert "8388608 bytes" in facts[3].text


def test_ports_without_pyverbs_are_described_with_what_to_run(machine, pyverbs, monkeypatch):
    machine.port("mlx5_0", [("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")])
    monkeypatch.setattr(sys, "path", [])
    limits(monkeypatch, 8, 8, True)
    facts = describe(machine.root)
    assert "apt-get install" in facts[1].fix
