#!/usr/bin/env bash
# The tests of the C kernels, over kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch: built into a scratch copy
# of the server, with the flags of pyproject.toml but for -O1. Arguments go to pytest in place of the tests' names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
tests=(tests/parity/test_gemm.py tests/parity/test_int8.py tests/parity/test_backends.py tests/parity/test_program.py)
watch=(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -r server "$scratch/"
rm -f "$scratch"/server/weir_server/exec/_kernels*.so
for source in server/weir_server/exec/*.c; do
  cc -g -O1 -fPIC -fopenmp -fno-math-errno -ffp-contract=fast -Wno-psabi "${watch[@]}" -c "$source" \
    -o "$scratch/$(basename "$source").o"
done
cc -shared "${watch[@]}" "$scratch"/*.o -o "$scratch/server/weir_server/exec/_kernels.so"

LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libubsan.so)"
export LD_PRELOAD PYTHONPATH=$scratch/server ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# a row that is shorter than it says must be seen, or the rest proves nothing
if "$python" -c '
import torch
from weir_server.exec.gemm import NativeKind
linear = NativeKind()(torch.ones(64, 4096))
x, y = torch.ones(1, 64), torch.empty(1, 64)
linear.kind.library.weir_gemm(linear.kind.isa, 1, 64, 4096, x.data_ptr(), 4096, linear.weight.data_ptr(), y.data_ptr(), 64)
' 2>"$scratch/seen"; then
  echo "sanitize: a read beyond a tensor was not noticed" >&2
  exit 1
fi
grep -q "AddressSanitizer: heap-buffer-overflow" "$scratch/seen" || { cat "$scratch/seen" >&2; exit 1; }

"$python" -m pytest -q -p no:cacheprovider "${@:-${tests[@]}}"
