#!/bin/sh
# Installs torchvision for a CPU, beside torch 2.13.0, into the Python environment of $PYTHON.
# transformers' processors of images and videos need its transforms, and vLLM imports Qwen-VL's
# and LLaVA's models only beside it. `make install` runs this, and the image of a CPU replica.
set -eu
python=${PYTHON:-python3}
index_torch_cpu=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
build=torchvision==0.28.0

install() {
  "$python" -m pip install --disable-pip-version-check -q --no-deps "$@"
}

works() {
  "$python" -c 'import torchvision.transforms.v2'
}

if install "$build+cpu" --retries 0 --extra-index-url "$index_torch_cpu" 2>/dev/null; then
  works
  exit
fi
# The package index has the build for CUDA alone. Its compiled operators cannot be loaded here, and
# the module that declares their shapes ends `import torchvision` ("operator torchvision::nms does
# not exist"). Only models that find boxes call them; the transforms are Python. So that module is
# emptied.
install "$build"
if works 2>/dev/null; then # a build for a CPU: those for other processors than x86 are
  exit
fi
echo "torchvision: no build for a CPU is to be had; the one for CUDA is installed without operators"
package=$("$python" -c \
  'import importlib.util; print(importlib.util.find_spec("torchvision").submodule_search_locations[0])')
# A new file: the old one may be shared with a cache of packages.
: >"$package/_meta_registrations.py.new"
mv "$package/_meta_registrations.py.new" "$package/_meta_registrations.py"
works
