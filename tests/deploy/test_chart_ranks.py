"""Workers of several ranks on the GPUs of one node, in the Helm chart."""

import pytest
from deployment import WORKERS
from helm_chart import DEFAULTS, container_of, of_kind, refusal, render, template, values_of
from pod_settings import mounted, pod_settings


def test_ranks_of_one_pod_have_a_gpu_each_and_shared_memory() -> None:
    manifests = render("one-node-four-gpus")
    assert container_of(manifests, "target-worker")["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert pod_settings(manifests, "target-worker").tensor_parallel == 4
    assert mounted(manifests, "target-worker")["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert "/dev/shm" not in mounted(manifests, "draft-worker")
    assert not of_kind(manifests, "LeaderWorkerSet")


def test_worker_of_one_rank_is_told_nothing_of_ranks() -> None:
    for component in WORKERS:
        server = container_of(render(DEFAULTS), component)
        assert "args" not in server
        assert "SPECPOOL_TENSOR_PARALLEL" not in {item["name"] for item in server["env"]}
        assert "/dev/shm" not in mounted(render(DEFAULTS), component)


def test_draft_has_a_degree_of_its_own() -> None:
    manifests = template("--set", "draft.gpus=2,draft.tensorParallel=2")
    assert [pod_settings(manifests, component).tensor_parallel for component in WORKERS] == [2, 1]


def test_ranks_may_share_cpus() -> None:
    settings = pod_settings(template(*values_of("cpu-kind"), "--set", "target.tensorParallel=3"), "target-worker")
    assert (settings.device, settings.tensor_parallel) == ("cpu", 3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("target.gpus=4", "target.tensorParallel: must be the number of GPUs, one for each rank: it is 1, but "
                          "target.gpus x target.nodes is 4 x 1"),
        ("target.gpus=2,target.nodes=2,target.tensorParallel=2", "it is 2, but target.gpus x target.nodes is 2 x 2"),
        ("target.tensorParallel=2", "it is 2, but target.gpus x target.nodes is 1 x 1"),
        ("draft.gpus=2", "draft.tensorParallel: must be the number of GPUs, one for each rank: it is 1, but draft.gpus "
                         "is 2"),
        ("target.gpus=0,target.nodes=2,target.tensorParallel=3",
         "target.tensorParallel: must be a multiple of target.nodes: it is 3, but target.nodes is 2"),
        ("target.gpus=0,target.nodes=2",
         "target.tensorParallel: must be a multiple of target.nodes: it is 1, but target.nodes is 2"),
        ("target.tensorParallel=0", "at '/target/tensorParallel': minimum: got 0, want 1"),
        ("target.nodes=0", "at '/target/nodes': minimum: got 0, want 1"),
        ("draft.nodes=2", "at '/draft': additional properties 'nodes' not allowed"),
        ("target.settings.tensor_parallel=2", "target.settings.tensor_parallel: the chart sets it from other values"),
        ("target.settings.node_rank=1", "target.settings.node_rank: the chart sets it from other values"),
        ("target.nodes=2,target.tensorParallel=2,updateStrategy.type=OnDelete",
         "updateStrategy.type: must be RollingUpdate with several target.nodes, not OnDelete"),
        ("target.nodes=2,target.tensorParallel=2,disaggregatedSet.enabled=true",
         "disaggregatedSet.enabled: must not be set with several target.nodes"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused_by_name(values: str, said: str) -> None:
    assert said in refusal("--set", values)
