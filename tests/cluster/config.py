"""Configuration of the cluster's daemons: pure functions from paths and addresses to files and command lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Mode = Literal["node", "controlplane"]

NODE_NAME: Final = "node1"
BRIDGE: Final = "kcni0"
ADDRESS: Final = "10.88.7.1"
PREFIX: Final = 24
POD_SUBNET: Final = "10.88.7.0/24"
#: The first addresses of the subnet are the node's own.
FIRST_POD_ADDRESS: Final = "10.88.7.10"
SERVICE_SUBNET: Final = "10.96.0.0/16"
SERVICE_ADDRESS: Final = "10.96.0.1"
PAUSE_IMAGE: Final = "vllmsnapshot.local/pause:1"
#: In the box /run is private, so the default addresses of tools like ctr and crictl are right.
CONTAINERD_SOCKET: Final = "/run/containerd/containerd.sock"

#: Without nodes and pods that run, only these have work to do; those that judge nodes or pods would even do harm
#: (the pod garbage collector deletes pods that a test binds to a node that it only pretends to have).
CONTROLPLANE_CONTROLLERS: Final = (
    "namespace-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "disruption-controller",
    "endpointslice-controller",
    "clusterrole-aggregation-controller",
    "resourcequota-controller",
    "validatingadmissionpolicy-status-controller",
)


@dataclass(frozen=True)
class Paths:
    """Where one run of a cluster keeps what. Everything but the target of ``containerd`` goes away with the run."""

    run: Path

    @property
    def containerd(self) -> Path:
        """containerd's root: a link to the slot of the image store that this run has claimed (see store.py)."""
        return self.run / "containerd"

    @property
    def certificates(self) -> Path:
        """Keys and certificates."""
        return self.run / "pki"

    @property
    def logs(self) -> Path:
        """One log per daemon."""
        return self.run / "logs"

    @property
    def audit_log(self) -> Path:
        """The apiserver's audit log."""
        return self.logs / "audit.log"

    @property
    def daemons(self) -> Path:
        """What the box is told to start, and what became of it."""
        return self.run / "daemons"

    @property
    def kubelet(self) -> Path:
        """The kubelet's root directory (``/var/lib/kubelet`` elsewhere)."""
        return self.run / "kubelet"

    @property
    def store(self) -> Path:
        """A directory for the agent's artifacts."""
        return self.run / "store"

    @property
    def gpus(self) -> Path:
        """The fake GPUs, if there are any."""
        return self.run / "gpus"

    def kubeconfig(self, name: str) -> Path:
        """The kubeconfig of one identity."""
        return self.run / f"{name}.kubeconfig"


@dataclass(frozen=True)
class Daemon:
    """A daemon of the cluster: a name for its log and the command line without the directory."""

    name: str
    argv: tuple[str, ...]


def cni(paths: Paths) -> dict[str, Any]:
    """The pod network: one bridge, addresses handed out by files in the run directory."""
    ranges = [[{"subnet": POD_SUBNET, "rangeStart": FIRST_POD_ADDRESS, "gateway": ADDRESS}]]
    return {
        "cniVersion": "1.0.0",
        "name": "cluster",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                # The box made the bridge and gave it its address, which the apiserver listens on before any pod exists.
                "isGateway": False,
                "ipMasq": False,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": ranges,
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": str(paths.run / "cni-data"),
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def kubelet(paths: Paths, cgroup: str) -> dict[str, Any]:
    """The kubelet's configuration file."""
    certificates = paths.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificates / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificates / "node.crt"),
        "tlsPrivateKeyFile": str(certificates / "node.key"),
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        # Two kubelets under one root would remove each other's pods as orphans.
        "cgroupRoot": f"/{cgroup}",
        "enforceNodeAllocatable": ["pods"],
        # From 1.35 on the kubelet refuses to start on cgroup v1 unless it is told that this is meant.
        "failCgroupV1": False,
        "failSwapOn": False,
        "podPidsLimit": -1,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        # Images come from the cache and are wanted next time; a full disk is the machine's owner's business.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "resolvConf": "/etc/resolv.conf",
        "clusterDomain": "cluster.local",
        "volumePluginDir": str(paths.run / "volume-plugins"),
        "staticPodPath": str(paths.run / "manifests"),
        "runtimeRequestTimeout": "10m",
        # At the default of 10 s a GPU that comes or goes would be seen that late.
        "nodeStatusUpdateFrequency": "2s",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    }


def containerd(paths: Paths, node: Path) -> str:
    """containerd's configuration file; *node* is the directory of runc and the CNI plugins."""
    return f"""version = 3
root = "{paths.containerd.resolve()}"
state = "/run/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.internal.v1.opt']
  path = "{paths.run}/opt"

[plugins.'io.containerd.nri.v1.nri']
  disable = true

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"

[plugins.'io.containerd.cri.v1.runtime']
  # Lowering oom_score_adj needs CAP_SYS_RESOURCE, which root in a sandbox may lack.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "{node}/runc"
        SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{node}"]
    conf_dir = "{paths.run}/cni"
"""


def scrub_containerd(root: Path, run: Path) -> str:
    """A containerd without CRI on the same store, in which leftovers of a run can be deleted one by one."""
    return f"""version = 3
root = "{root}"
state = "{run}/state"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt",
]

[grpc]
  address = "{run}/containerd.sock"
"""


def write_files(paths: Paths, cgroup: str, node: Path | None) -> None:
    """Write the configuration files of a run; *node* is None without a node."""
    for directory in ("logs", "daemons", "cni", "manifests", "kubelet", "store", "volume-plugins", "opt"):
        (paths.run / directory).mkdir(parents=True, exist_ok=True)
    (paths.run / "audit-policy.json").write_text(json.dumps(audit_policy()))
    if node is None:
        return
    (paths.run / "cni" / "10-cluster.conflist").write_text(json.dumps(cni(paths), indent=1))
    (paths.run / "kubelet.json").write_text(json.dumps(kubelet(paths, cgroup), indent=1))
    (paths.run / "containerd.toml").write_text(containerd(paths, node))


def audit_policy() -> dict[str, Any]:
    """Who asked for what, of service accounts that are not Kubernetes' own: tests compare it with what the chart grants."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
            {"level": "None"},
        ],
    }


def etcd(paths: Paths) -> Daemon:
    """etcd on the box's loopback, without fsync: its data never outlives the run."""
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return Daemon(
        "etcd",
        (
            "etcd",
            f"--data-dir={paths.run}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def apiserver(paths: Paths) -> Daemon:
    """kube-apiserver with RBAC, node authorization and the aggregation layer's certificates."""
    certificates = paths.certificates
    return Daemon(
        "kube-apiserver",
        (
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            f"--advertise-address={ADDRESS}",
            "--secure-port=6443",
            f"--tls-cert-file={certificates}/apiserver.crt",
            f"--tls-private-key-file={certificates}/apiserver.key",
            f"--client-ca-file={certificates}/ca.crt",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificates}/service-account.pub",
            f"--service-account-signing-key-file={certificates}/service-account.key",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            f"--kubelet-client-certificate={certificates}/kubelet-client.crt",
            f"--kubelet-client-key={certificates}/kubelet-client.key",
            f"--kubelet-certificate-authority={certificates}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={certificates}/ca.crt",
            "--requestheader-allowed-names=aggregator",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={certificates}/aggregator.crt",
            f"--proxy-client-key-file={certificates}/aggregator.key",
            f"--audit-policy-file={paths.run}/audit-policy.json",
            f"--audit-log-path={paths.audit_log}",
        ),
    )


def controller_manager(paths: Paths, mode: Mode) -> Daemon:
    """kube-controller-manager; without a node only the controllers that make sense without one."""
    certificates = paths.certificates
    config = paths.kubeconfig("controller-manager")
    controllers = "*" if mode == "node" else ",".join(CONTROLPLANE_CONTROLLERS)
    return Daemon(
        "kube-controller-manager",
        (
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            f"--controllers={controllers}",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={certificates}/service-account.key",
            f"--root-ca-file={certificates}/ca.crt",
            f"--cluster-signing-cert-file={certificates}/ca.crt",
            f"--cluster-signing-key-file={certificates}/ca.key",
            # At the default of 20 requests a second its start alone takes 4 s.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            # The default of 15 s would make every autoscaling test wait.
            "--horizontal-pod-autoscaler-sync-period=3s",
        ),
    )


def scheduler(paths: Paths) -> Daemon:
    """kube-scheduler."""
    config = paths.kubeconfig("scheduler")
    return Daemon(
        "kube-scheduler",
        (
            "kube-scheduler",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        ),
    )


def containerd_daemon(paths: Paths) -> Daemon:
    """containerd."""
    return Daemon("containerd", ("containerd", "--config", f"{paths.run}/containerd.toml"))


def kubelet_daemon(paths: Paths) -> Daemon:
    """The kubelet."""
    return Daemon(
        "kubelet",
        (
            "kubelet",
            f"--config={paths.run}/kubelet.json",
            f"--kubeconfig={paths.kubeconfig('node')}",
            f"--root-dir={paths.kubelet}",
            f"--cert-dir={paths.kubelet}/pki",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={ADDRESS}",
            "--v=2",
        ),
    )


def proxy(paths: Paths) -> Daemon:
    """kube-proxy in iptables mode. Its conntrack settings are the machine's, so they are left alone."""
    return Daemon(
        "kube-proxy",
        (
            "kube-proxy",
            f"--kubeconfig={paths.kubeconfig('proxy')}",
            f"--hostname-override={NODE_NAME}",
            f"--cluster-cidr={POD_SUBNET}",
            "--proxy-mode=iptables",
            f"--bind-address={ADDRESS}",
            "--healthz-bind-address=127.0.0.1:10256",
            "--metrics-bind-address=127.0.0.1:10249",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--oom-score-adj=0",
        ),
    )
