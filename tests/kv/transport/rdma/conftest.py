"""A machine whose RDMA ports a test writes into a sysfs tree of its own."""

import pytest

from dsuf.kv.transport.rdma import ports


@pytest.fixture
def machine(tmp_path):
    """Writes a sysfs tree as the kernel does: a slot of the GID table without an address has no type to read."""

    class Machine:
        root = tmp_path
        devices = 0

        def port(self, device, gids, number=1, state="4: ACTIVE", layer="Ethernet", rate="400 Gb/sec (4X NDR)", **more):
            folder = tmp_path / ports.CLASS / device / "ports" / str(number)
            for part in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
                (folder / part).mkdir(parents=True, exist_ok=True)
            for name, text in (
                ("state", state),
                ("link_layer", layer),
                ("rate", rate),
                ("lid", more.get("lid", "0x0")),
            ):
                (folder / name).write_text(text + "\n")
            for index, (address, kind) in enumerate(gids):
                (folder / f"gids/{index}").write_text(address + "\n")
                if address != ports.NO_GID:
                    (folder / f"gid_attrs/types/{index}").write_text(kind + "\n")
                    (folder / f"gid_attrs/ndevs/{index}").write_text("eth7\n")
            if "numa" in more:
                (tmp_path / ports.CLASS / device / "device").mkdir()
                (tmp_path / ports.CLASS / device / "device/numa_node").write_text(f"{more['numa']}\n")
            if number == 1 and more.get("node", True):
                self._node(device)
            return self

        def _node(self, device):
            verbs = tmp_path / ports.VERBS_CLASS / f"uverbs{self.devices}"
            verbs.mkdir(parents=True)
            (verbs / "ibdev").write_text(device + "\n")
            node = tmp_path / "dev/infiniband" / verbs.name
            node.parent.mkdir(parents=True, exist_ok=True)
            node.touch()
            self.devices += 1

        def find(self, *wanted):
            return ports.find(wanted or None, tmp_path)

    return Machine()
