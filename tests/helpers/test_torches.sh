#!/bin/bash
# For each argument, a version of torch or the folder of a Python environment: builds a copy of this checkout with it, and
# runs the tests that depend most on torch. Prints one line for each. Environments, copies and builds stay in
# build/torches. Variables: PYTHON, which makes environments, and PIP_ARGS, options for pip.
set -eu -o pipefail

TESTS="tests/ranks/test_torch_groups.py tests/ddp/test_changed_parameters.py tests/ddp/test_ddp_refusals.py
  tests/reducer/test_data_parallel_life.py tests/reducer/test_data_parallel_passes.py tests/test_pipelines.py
  tests/fsdp/test_fsdp_handle.py"

mkdir -p build/torches
unset CXX MAKEFLAGS MFLAGS
failed=
for torch in "$@"; do
  environment=$(realpath -m "$([ -d "$torch" ] && echo "$torch" || echo "build/torches/env-$torch")")
  if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install --quiet ${PIP_ARGS:-} "torch==$torch" numpy 'setuptools>=77' wheel ninja 'pytest>=9' \
      pytest-timeout pytest-xdist hypothesis || { rm -rf "$environment"; failed+=" $torch"; continue; }
  fi
  log=$PWD/build/torches/$(basename "$torch").log copy=$PWD/build/torches/copy-$(basename "$torch")
  mkdir -p "$copy"
  find "$copy" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +  # files that the checkout no longer has
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --preserve=timestamps --target-directory "$copy"
  if (
    cd "$copy"
    ln -sfn ../kernels fusedcomm/kernels
    export PATH=$environment/bin:$PATH PYTHONPATH=$copy
    make --no-print-directory build VENV= PYTHON="$environment/bin/python"
    python -m pytest -q -n 3 $TESTS
  ) > "$log" 2>&1; then
    echo "$torch: $(tail -1 "$log")"
  else
    echo "$torch: failed, see $log"
    failed+=" $torch"
  fi
done
[ -z "$failed" ] || { echo "Failed:$failed" >&2; exit 1; }
