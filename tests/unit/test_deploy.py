"""The files of deploy/ agree with each other and with what the programs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from fusecache.base import mounts
from fusecache.config.options import read_file
from hintsd.client.finding import SOCKET_VARIABLE
from tests.support.mounted import ROOT

DEPLOY = ROOT / "deploy"
PUBLIC = mounts.public_socket(mounts.hintsd_socket(0))
RUN = str(Path(mounts.hintsd_socket(0)).parent.parent)


def binds_of_service(service: dict[str, Any]) -> dict[str, str]:
    """Of compose.yaml: target -> mode or propagation."""
    found = {}
    for one in service["volumes"]:
        if isinstance(one, str):
            _, target, *mode = one.split(":")
            found[target] = mode[0] if mode else "rw"
        else:
            found[one["target"]] = one["bind"]["propagation"]
    return found


def binds_of_container(container: dict[str, Any]) -> dict[str, str]:
    """Of Kubernetes: mountPath -> mode or propagation."""
    return {
        one["mountPath"]: one.get("mountPropagation", "ro" if one.get("readOnly") else "rw")
        for one in container["volumeMounts"]
    }


def settings() -> dict[str, Any]:
    return read_file(str(DEPLOY / "container/mount.toml"))


def check(
    binds: dict[str, str], hintsd: dict[str, str], training: dict[str, str], out: str
) -> None:
    told = settings()
    parent = str(Path(told["mountpoint"]).parent)
    assert binds[told["source"]] == "ro"
    assert binds[told["cache_dir"]] == binds[RUN] == hintsd[RUN] == "rw"
    into = {"rshared": "rslave", "Bidirectional": "HostToContainer"}[out]
    assert (binds[parent], hintsd[parent], training[parent]) == (out, into, into)
    public = str(Path(PUBLIC).parent)
    assert (binds[public], hintsd[public], training[public]) == ("rw", "rw", "ro")
    assert set(training) == {parent, public}


def test_compose() -> None:
    services = compose()
    mount, hintsd, train = services["fusecache"], services["hintsd"], services["train"]
    check(binds_of_service(mount), binds_of_service(hintsd), binds_of_service(train), "rshared")
    assert mount["pid"] == hintsd["pid"] == "host"
    assert train["environment"] == {SOCKET_VARIABLE: PUBLIC}
    assert mount["healthcheck"]["test"][-1] == settings()["mountpoint"]


def test_kubernetes() -> None:
    daemons = yaml.safe_load((DEPLOY / "kubernetes/fusecache.yaml").read_text())
    pod = yaml.safe_load((DEPLOY / "kubernetes/training.yaml").read_text())
    spec = daemons["spec"]["template"]["spec"]
    mount, hintsd = spec["containers"]
    (train,) = pod["spec"]["containers"]
    binds, train_binds = binds_of_container(mount), binds_of_container(train)
    check(binds, binds_of_container(hintsd), train_binds, "Bidirectional")
    assert spec["hostPID"] is True
    assert mount["securityContext"] == {"privileged": True}
    assert train["env"] == [{"name": SOCKET_VARIABLE, "value": PUBLIC}]
    assert pod["spec"]["nodeSelector"] == spec["nodeSelector"]
    for probe in ("startupProbe", "livenessProbe"):
        assert mount[probe]["exec"]["command"][-1] == settings()["mountpoint"]
    for given in (spec, pod["spec"]):
        volumes = {volume["name"] for volume in given["volumes"]}
        for container in given["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} <= volumes


def test_the_image_runs_what_is_bound() -> None:
    text = (DEPLOY / "container/Dockerfile").read_text()
    words = ["mount", "--foreground", "--config", "/etc/fusecache/mount.toml"]
    assert text.splitlines()[-2:] == ['ENTRYPOINT ["fusecache"]', f"CMD {json.dumps(words)}"]
    assert binds_of_service(compose()["fusecache"])[words[-1]] == "ro"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())
    services: dict[str, Any] = found["services"]
    return services
