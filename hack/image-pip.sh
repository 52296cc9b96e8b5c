#!/bin/sh
# pip inside an image build: from the context's wheels/ alone where there is one, else from the index (torch from TORCH_INDEX).
set -eu
if [ -d /context/wheels ]; then
  set -- --no-index --find-links /context/wheels "$@"
elif [ -n "${TORCH_INDEX:-}" ]; then
  set -- --index-url "$TORCH_INDEX" "$@"
fi
exec /opt/weir/bin/pip install -q --no-cache-dir --disable-pip-version-check --root-user-action ignore -c /src/constraints.txt "$@"
