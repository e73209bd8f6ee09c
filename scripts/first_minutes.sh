#!/usr/bin/env bash
# Times a wheel's first minutes: `pip install WHEEL`, `verify`, and a process that trains a layer.
#
#   scripts/first_minutes.sh WHEEL [cpu|cuda]
#
# PYTHON (python3) brings torch and the command line's packages; the wheel goes into a new environment
# beside them. No network, and nothing but that environment on PATH: neither compiler nor nvcc.
set -euo pipefail
wheel=$(realpath "${1:?usage: scripts/first_minutes.sh WHEEL [cpu|cuda]}")
device=${2:-cpu}
python=$(command -v "${PYTHON:-python3}")
folder=$(mktemp -d)
trap '/bin/rm -rf "$folder"' EXIT
cd "$folder"
"$python" -m venv --without-pip new
new=$folder/new/bin
"$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' |
  tee "$("$new/python" -c 'import site; print(site.getsitepackages()[0])')/outer.pth"
export PATH=$new CC=/no/compiler CXX=/no/compiler CUDACXX=/no/nvcc
for tool in gcc g++ cc c++ clang nvcc cmake ninja; do
  ! type "$tool" 2>/dev/null || exit 1
done
if "$new/python" -c "import fp8moe_cutlass"; then echo "fp8moe_cutlass is here before"; exit 1; fi 2>/dev/null

start=${EPOCHREALTIME/./}
passed() { printf '== %s in %d ms\n' "$1" $(((${EPOCHREALTIME/./} - start) / 1000)); start=${EPOCHREALTIME/./}; }
"$python" -m pip --python "$new/python" install --no-deps --no-index --no-build-isolation --only-binary :all: "$wheel"
passed "installed"
"$new/fp8moe-cutlass" verify --device "$device"
passed "verified"

"$new/python" - "$device" <<'PYTHON'
import sys, time

clock = time.perf_counter
began = clock()
import torch
from fp8moe_cutlass import nn

imported = clock()
device = sys.argv[1]
moe = nn.MoE(
    nn.Router(1024, 8, 2, coefficients=nn.LossCoefficients(balancing=0.01), device=device),
    nn.MoEExperts(8, 1024, 512, device=device),
)
optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-3)
ends = [clock()]
losses = []
for step in range(3):
    x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
    loss = (moe(x) - x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    ends.append(clock())
print(f"imports {imported - began:.2f} s, layer {ends[0] - imported:.2f} s, steps",
      *(f"{b - a:.3f}" for a, b in zip(ends, ends[1:])), "s, losses", *(f"{l:.4f}" for l in losses))
PYTHON
passed "three steps trained"

"$new/fp8moe-cutlass" doctor
"$new/python" - "$wheel" <<'PYTHON'
import base64, hashlib, pathlib, sys, zipfile

import torch
import fp8moe_cutlass
from fp8moe_cutlass import nn

package = pathlib.Path(fp8moe_cutlass.__file__).parent
assert package.is_relative_to(sys.prefix), package
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.startswith("fp8moe_cutlass/") and n[-1] != "/"]
    for name in names:
        assert (package.parent / name).read_bytes() == wheel.read(name), name
moe = nn.MoE(nn.Router(128, 2, 2), nn.MoEExperts(2, 128, 128))
moe(torch.ones(8, 128, dtype=torch.bfloat16))
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(f"{len(names)} files of {package} are the wheel's, byte for byte; loaded:")
print(*sorted(f for f in loaded if "fp8moe" in f or "gomp" in f or "iomp" in f), sep="\n")
PYTHON
