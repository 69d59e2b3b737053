#!/bin/bash
# Compile to bytecode, and read once, the Python packages of the GPU checks.
#
#   setsid tests/gpu/warm.sh FOLDER... >/tmp/warm.log 2>&1 &      # FOLDER: where packages were unpacked
#
# Otherwise every process on a fresh machine compiles their modules first.
set -u
LARGE="torch triton transformers tokenizers huggingface_hub numpy scipy sympy pandas PIL torchvision \
aiohttp pydantic fastapi uvicorn starlette httpx h5py psutil networkx jinja2 einops requests"
unset PYTHONDONTWRITEBYTECODE
folders=$(python3 - $LARGE <<'PYTHON'
import importlib.util, os, sys
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    if found is not None and found.origin:
        print(os.path.dirname(found.origin))
PYTHON
)
python3 -m compileall -q -j 0 "$@" $folders
find "$@" $folders -name '*.so*' -type f -print0 | xargs -0 -P 8 -n 4 cat >/dev/null
echo "warm after $SECONDS s"
