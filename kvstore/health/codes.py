"""Registry of health codes, each with its meaning and an action. The documentation has a page per code, made from this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Severity(Enum):
    """How urgent a finding is."""

    INFO = "info"
    """Nothing is missing, but an operator should know it. It does not change the health of the store."""
    WARNING = "warning"
    """Everything works, but capacity or redundancy is missing or will be missing soon."""
    ERROR = "error"
    """Something does not work now: blocks are misses, or new blocks are not durable."""


@dataclass(frozen=True, slots=True)
class HealthCode:
    """A kind of finding.

    Attributes:
        name: upper-case name, which scripts may rely on.
        severity: how urgent it is.
        title: a few words.
        meaning: consequence for engines and data.
        action: first step of the operator.
    """

    name: str
    severity: Severity
    title: str
    meaning: str
    action: str

    @property
    def docs(self) -> str:
        """Path of its page in the documentation."""
        return f"docs/reference/health/{self.name.lower().replace('_', '-')}.md"

    @property
    def page(self) -> str:
        """Its page in the documentation, in Markdown."""
        return (
            f"# {self.name}\n\n**{self.title}.** Severity: {self.severity.value}.\n\n"
            f"## What it means\n\n{self.meaning}\n\n## What to do\n\n{self.action}\n\n"
            "`kvstore status --detail` shows the present facts, `kvstore history` when it began."
            " [All health codes](index.md)\n"
        )


_codes: dict[str, HealthCode] = {}


def _error(name: str, title: str, meaning: str, action: str) -> HealthCode:
    return _codes.setdefault(name, HealthCode(name, Severity.ERROR, title, meaning, action))


def _warning(name: str, title: str, meaning: str, action: str) -> HealthCode:
    return _codes.setdefault(name, HealthCode(name, Severity.WARNING, title, meaning, action))


def _info(name: str, title: str, meaning: str, action: str) -> HealthCode:
    return _codes.setdefault(name, HealthCode(name, Severity.INFO, title, meaning, action))


# ---- metadata server ----
METADATA_UNREACHABLE: Final = _error(
    "METADATA_UNREACHABLE",
    "The metadata server does not answer",
    "Lookups find nothing, so engines compute every prompt. Nodes on their hosts still accept stores, and publish the new blocks"
    " when the server is back. The index survives a restart.",
    "Start the metadata server again, and read its log: journalctl -u kvstore-metadata. If it runs, compare its address, TLS"
    " files and token with those of the caller.",
)
METADATA_SERVERS_DIFFER: Final = _error(
    "METADATA_SERVERS_DIFFER",
    "Metadata servers have different indexes",
    "Servers that the setting `metadata` names in one list must share an index. Now each finds only the blocks of the nodes that"
    " use it, so the result of a lookup depends on the server that answers.",
    "Set the same metadata.engine on each host, and restart the servers that lacked it. Without an index in Valkey, name one"
    " server only.",
)
INDEX_READ_ONLY: Final = _error(
    "INDEX_READ_ONLY",
    "The index accepts no changes",
    "Lookups continue with the present index. New blocks are stored but not found by other hosts. Nodes keep their changes and"
    " send them again.",
    "Free space on the file system of metadata.index_path, or give the shards of a shared index more memory (maxmemory)."
    " The index then accepts changes without a restart.",
)
INDEX_DISK_NEARLY_FULL: Final = _warning(
    "INDEX_DISK_NEARLY_FULL",
    "The file system of the index is almost full",
    "Without free space the index accepts no changes, and new blocks are not found by other hosts.",
    "Free space on the file system of metadata.index_path, or move the index to a larger one.",
)
SETTINGS_FILE_UNREADABLE: Final = _error(
    "SETTINGS_FILE_UNREADABLE",
    "The file of quotas and retention rules cannot be read",
    "Nodes keep their last quotas and rules of namespaces. Changes are rejected.",
    "Repair the file or restore it from a backup. If you remove it, all quotas and rules are lost.",
)
FILE_NOT_WRITTEN: Final = _warning(
    "FILE_NOT_WRITTEN",
    "A file of a metadata server cannot be written",
    "The server keeps its copy of quotas and rules of namespaces, or its cluster events, in memory only. They are lost if Valkey"
    " loses its data and all metadata servers end.",
    "Free space, or correct the owner of the folder. The file is then written without a restart.",
)
NO_NODES: Final = _warning(
    "NO_NODES",
    "No node has registered",
    "The store holds no blocks: every lookup is a miss. If the metadata server has lost its index, nodes register again within"
    " seconds and send their blocks.",
    "Start a node on each host with `kvstore node`, and set node.metadata to the address of this metadata server.",
)

# ---- index in a Valkey Cluster ----
SHARD_AWAY: Final = _error(
    "SHARD_AWAY",
    "A shard of the index does not answer",
    "Its records are unknown: some lookups find a few blocks less. New blocks are published without the records that belong"
    " there; nodes compare these ranges after the shard is back. If it has a replica, the cluster promotes the replica within"
    " seconds. While the shard of the small state is away, nothing is published: nodes repeat their changes.",
    "If it lasts longer than a few seconds, check the server's process, host and network, and `CLUSTER NODES` on another server."
    " Without a replica, start the server again, even without data: nodes send its records again.",
)
SHARD_WITHOUT_REPLICA: Final = _warning(
    "SHARD_WITHOUT_REPLICA",
    "A shard of the index has no replica",
    "If its primary ends, the records of the shard are lost, and lookups find fewer blocks until nodes have sent them again. No"
    " block is lost.",
    "Start the replica again, or add one: `valkey-cli --cluster add-node NEW:PORT EXISTING:PORT --cluster-slave`.",
)
SLOTS_WITHOUT_SERVER: Final = _error(
    "SLOTS_WITHOUT_SERVER",
    "A part of the index is served by no server",
    "No server of the cluster serves some hash slots: a shard was removed, or the cluster was never complete. Blocks whose"
    " records belong there are not found and cannot be published.",
    "Assign the slots: `valkey-cli --cluster fix HOST:PORT`.",
)
SHARD_MEMORY_NEARLY_FULL: Final = _warning(
    "SHARD_MEMORY_NEARLY_FULL",
    "A server of the index has almost no memory left",
    "At maxmemory the server rejects new records: blocks that belong to its shard are stored, but other hosts do not find them.",
    "Raise maxmemory (`CONFIG SET maxmemory`) if the host has memory left; otherwise add a shard and move slots to it"
    " (`valkey-cli --cluster rebalance HOST:PORT --cluster-use-empty-masters`).",
)
SHARD_EVICTS_RECORDS: Final = _warning(
    "SHARD_EVICTS_RECORDS",
    "A server of the index may evict records",
    "At maxmemory the server deletes records, also registrations of nodes and namespaces. Lookups then find fewer"
    " blocks than nodes hold.",
    "Set `maxmemory-policy noeviction` on each server, in its file and with CONFIG SET.",
)
SHARD_PERSISTS: Final = _warning(
    "SHARD_PERSISTS",
    "A server of the index writes its data to disk",
    "Snapshots and rewrites of the append-only file fork the server, which stops it for a moment and can double its memory. The"
    " index gains little: nodes send its contents again after a loss.",
    'Switch it off on each server, in its file and with CONFIG SET: `save ""` and `appendonly no`.',
)
SHARD_VERSIONS_DIFFER: Final = _warning(
    "SHARD_VERSIONS_DIFFER",
    "The servers of the index have different versions",
    "An upgrade is in progress or was left unfinished. Metadata servers use only the commands that all servers know.",
    "Finish the upgrade. Then restart the metadata servers one by one, so that they use the commands of the new version.",
)
INDEX_WITHOUT_REPLICAS: Final = _info(
    "INDEX_WITHOUT_REPLICAS",
    "No shard of the index has a replica",
    "If a primary ends, its records are lost, and lookups find fewer blocks until nodes have sent them again. No block is lost.",
    "Add a replica to each shard: `valkey-cli --cluster add-node NEW:PORT EXISTING:PORT --cluster-slave`. A trial needs none.",
)
SHARD_WITHOUT_COMPARE_AND_SET: Final = _info(
    "SHARD_WITHOUT_COMPARE_AND_SET",
    "The servers of the index are old",
    "They lack the command that replaces a record only if it is unchanged. A script does the same, at a higher cost of CPU.",
    "Use Valkey 9.0 or later if publishing is limited by the CPU of the servers.",
)
ONE_METADATA_SERVER: Final = _info(
    "ONE_METADATA_SERVER",
    "Only one metadata server serves a shared index",
    "If it ends, engines compute their prompts until it runs again.",
    "Start another metadata server with the same metadata.engine on another host, and name both in the setting `metadata` of"
    " nodes and clients.",
)

# ---- nodes that do not report ----
NODE_SILENT: Final = _error(
    "NODE_SILENT",
    "A node does not report",
    "Its blocks are misses until it reports again. Engines on its host compute what they cannot load.",
    "Check the node's process and log on its host: systemctl status kvstore-node. Then check the network between both hosts.",
)
NODE_DOWN: Final = _error(
    "NODE_DOWN",
    "A node's process has ended",
    "Its host answers, but nothing listens on the node's port. Its blocks are misses. Blocks on NVMe return when the node starts"
    " again; blocks in DRAM alone are lost.",
    "Start the node again on its host (systemctl start kvstore-node), and read its log: journalctl -u kvstore-node."
    " If the log ends without an error, the kernel may have killed it for memory: journalctl -k | grep -i oom.",
)
NODE_HUNG: Final = _error(
    "NODE_HUNG",
    "A node's process runs but does not respond",
    "The node's port accepts connections, but the process does not answer: it is suspended, blocked by a disk, or starved of"
    " CPU. Its blocks are misses, and engines on its host compute.",
    "Look at the process on its host: `ps -o pid,stat,wchan,args -C kvstore` (T: suspended, D: waits for a disk), and `dmesg`"
    " for disk errors."
    " Restart the node if it does not recover.",
)
NODE_UNREACHABLE: Final = _error(
    "NODE_UNREACHABLE",
    "A node's host cannot be reached",
    "The metadata server cannot connect to the node's host: the host is down, or the network between them is cut. The node's"
    " blocks are misses.",
    "Check that the host is up, and check the network and firewalls between it and the metadata server.",
)
NODE_CUT_OFF: Final = _error(
    "NODE_CUT_OFF",
    "A node runs, but its heartbeats do not arrive",
    "The metadata server reaches the node, but the node does not reach the metadata server. Its blocks are misses until it"
    " reports again.",
    "Read the node's log for the reason (address, TLS, firewall in one direction), and compare node.metadata with the address of"
    " the metadata server.",
)
NODE_REFUSED: Final = _error(
    "NODE_REFUSED",
    "The metadata server rejects a node's calls",
    "The node runs and calls the metadata server, which rejects its token. The node's blocks are misses.",
    "Put a token with the role node into the file of node.token_file, or add the token to metadata.tokens_file. No restart is"
    " required.",
)
NODE_STOPPED: Final = _warning(
    "NODE_STOPPED",
    "A node was stopped in an orderly way",
    "It has written its blocks to NVMe and left. They are misses until it starts again, or are read by nodes that mount its"
    " volumes.",
    "Start the node again, or forget it with `kvstore nodes remove NODE`.",
)
DRAIN_BLOCKED: Final = _warning(
    "DRAIN_BLOCKED",
    "A node cannot be drained",
    "Some blocks exist only in its DRAM and cannot be written elsewhere. They are lost if the node stops now.",
    "Free space on its volumes or on the target of the drain, or accept the loss and stop the node. Cancel with `kvstore nodes"
    " undrain NODE`.",
)

# ---- nodes that report ----
NODE_SLOW: Final = _warning(
    "NODE_SLOW",
    "A node is slow",
    "Loads of blocks that this node holds take long. Either its process was stopped or starved of CPU, or other nodes wait for"
    " it: within a minute, three or more loads at one of them took longer than observe.slow_load, mostly to read from this node,"
    " at less than 100 MB/s.",
    "Check the CPU, memory and disks of its host (top, vmstat 1, iostat -x 1) and its links (`kvstore top`, ethtool -S). `kvstore"
    " loads` shows the loads that wait for it. If it stays slow, drain it: `kvstore nodes drain NODE`.",
)
PUBLISH_FAILS: Final = _error(
    "PUBLISH_FAILS",
    "A node cannot publish its blocks",
    "The node stores blocks and serves engines on its host, but other hosts do not find its new blocks.",
    "Check the metadata server (is INDEX_READ_ONLY reported?) and the network. The node repeats its changes until the"
    " server accepts them.",
)
SECOND_COPIES_LATE: Final = _warning(
    "SECOND_COPIES_LATE",
    "Second copies are late",
    "Durable blocks of namespaces with two copies are on one node only. Loads work, but the loss of this node with its volumes"
    " would lose these blocks.",
    "Read the facts. No space: add volumes or nodes, or give fewer namespaces two copies. Bandwidth: raise node.move_bandwidth."
    " No other node: start one with a volume, in another node.zone if there are zones.",
)
STORAGE_NODE_FAILS: Final = _error(
    "STORAGE_NODE_FAILS",
    "A node without NVMe cannot write blocks back",
    "The storage node of node.write_back_to does not accept blocks. New blocks stay in DRAM and are lost with a restart.",
    "Check the storage node: its volumes, its process, and the network between both.",
)
VOLUME_WRITE_FAILS: Final = _error(
    "VOLUME_WRITE_FAILS",
    "Writes to a volume fail",
    "The volume serves the blocks that it holds. New blocks stay in DRAM only and are lost with a restart. Writes are tried"
    " again.",
    "Free space on the file system of the volume, or replace the disk. The node then writes to it again without a restart.",
)
VOLUME_READ_ONLY: Final = _error(
    "VOLUME_READ_ONLY",
    "A volume accepts no blocks",
    "The volume serves the blocks that it holds. New blocks go to other volumes, or stay in DRAM only.",
    "Read the reason, and free space or repair the disk. The node then writes to the volume again without a restart, unless"
    " the reason asks for one. After a repair, compare its blocks with their checksums:"
    " `kvstore volumes check VOLUME`.",
)
VOLUME_ADOPTED: Final = _warning(
    "VOLUME_ADOPTED",
    "A node has adopted the volume of another node",
    "The first owner was silent, so a node with node.adopt_mounts took its volume over. Blocks are found, loaded and evicted"
    " there, and none is lost.",
    "Nothing is urgent. To give the volume back, start its first owner, then stop the adopter gracefully (SIGTERM): the first"
    " owner takes the volume back within seconds.",
)
VOLUME_FENCED: Final = _warning(
    "VOLUME_FENCED",
    "Another node has adopted a volume of this node",
    "This node was silent for longer than node.adopt_after of the adopter. It writes nothing to the volume, reads it"
    " like any node that mounts it, and has less space for new blocks.",
    "Find out why the node was silent. To get the volume back, stop the adopter gracefully (SIGTERM): this node takes it back"
    " within seconds.",
)
VOLUME_HUNG: Final = _error(
    "VOLUME_HUNG",
    "A volume does not answer reads or writes",
    "The disk or its file system hangs. Blocks of this volume are misses, or are read from other nodes.",
    "Look for disk errors with `dmesg` and for a lost mount (NFS, network block device). The volume is used again after the first"
    " answered I/O. Restart the node only if the volume stays hung after the repair.",
)
VOLUME_SLOW: Final = _warning(
    "VOLUME_SLOW",
    "A node's volumes are slow",
    "Within a minute, three or more loads took longer than observe.slow_load, mostly to read from this node's volumes, at less"
    " than 100 MB/s. All blocks are still served.",
    "Look at the disks of the host with iostat -x 1, and for errors with `dmesg` and `smartctl -a`. If the disks are only busy,"
    " add DRAM (node.dram) or a volume.",
)
BLOCKS_CORRUPT: Final = _error(
    "BLOCKS_CORRUPT",
    "Blocks on a volume do not match their checksums",
    "The disk returned wrong bytes. The blocks were not served; they are in quarantine, and a lookup misses them.",
    "Check the whole volume with `kvstore volumes check VOLUME` and the disk with `smartctl -a`. Replace the disk if it happens"
    " again.",
)
VOLUME_DISK_NEARLY_FULL: Final = _warning(
    "VOLUME_DISK_NEARLY_FULL",
    "The file system of a volume is almost full",
    "The slots of the volume are reserved, but its catalog still grows. Without free space the volume accepts no blocks.",
    "Free space on that file system: a volume cannot be made smaller.",
)

# ---- any process ----
QUOTA_NEARLY_USED: Final = _warning(
    "QUOTA_NEARLY_USED",
    "A tenant has almost used its quota",
    "At the quota, new blocks of the tenant replace its own coldest blocks, and its hit ratio falls.",
    "Raise the quota with `kvstore tenants set`, or evict namespaces of the tenant that are no longer used.",
)
QUOTA_EXCEEDED: Final = _warning(
    "QUOTA_EXCEEDED",
    "A tenant holds more than its quota",
    "Nodes evict the tenant's coldest blocks until it is within its quota. A drain that moves blocks (`kvstore nodes drain NODE"
    " --move`) keeps the blocks of both nodes until it is cancelled or the node stops, so they count twice.",
    "Wait for a minute after a quota was lowered. If a node drains, stop it, or cancel the drain: `kvstore nodes undrain NODE`.",
)
CERTIFICATE_EXPIRES: Final = _warning(
    "CERTIFICATE_EXPIRES",
    "A TLS certificate expires soon",
    "After its end no client and no server accepts it, and the process is cut off from the others.",
    "Replace the certificate and key files: servers present them within seconds. If client certificates are required, restart the"
    " process too, one host after another: its gRPC channels present the certificate that they read at the start.",
)
CERTIFICATE_EXPIRED: Final = _error(
    "CERTIFICATE_EXPIRED",
    "A TLS certificate has expired",
    "New connections with this certificate are rejected. Connections that were open before continue until they end.",
    "Replace the certificate and key files: servers present them within seconds. If client certificates are required, restart the"
    " process too, one host after another: its gRPC channels present the certificate that they read at the start.",
)
CLOCK_DIFFERS: Final = _warning(
    "CLOCK_DIFFERS",
    "The clock of a host differs",
    "Times in logs cannot be compared, and certificates may seem expired or not yet valid. Blocks are not affected.",
    "Synchronise the clocks: `timedatectl status` on both hosts.",
)

CODES: Final[Mapping[str, HealthCode]] = _codes
"""All codes by name."""


def code_named(name: str) -> HealthCode:
    """Return a code by name; a code of a newer version is a warning without text."""
    known = CODES.get(name)
    if known is not None:
        return known
    shown = name[:64] if name.isprintable() else "UNKNOWN"
    return HealthCode(
        shown,
        Severity.WARNING,
        "A code of another version",
        "This version does not know the code.",
        "Use the version of the server that reports it.",
    )
