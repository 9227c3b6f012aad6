#!/usr/bin/env bash
# Builds the engine, the codec and the exchange with each sanitizer and runs the stress programs:
#   engine_stress    lanes are threads; needs no torch
#   exchange_stress  messages between ranks; a script, which needs torch
# The one that needs torch is skipped if PYTHON has none. Neither torch nor Python is instrumented, and need not be: the
# code that orders messages is built here and is instrumented.
#
# Arguments: the tests to run; all of them without arguments.
# Environment variables: CXX, PYTHON, and SANITIZERS, a list of -fsanitize values separated by spaces.
set -euo pipefail
tests=" ${*:-engine_stress exchange_stress} "
for test in $tests; do
  case "$test" in
    engine_stress | exchange_stress) ;;
    *) echo "$test: no such test; there are engine_stress and exchange_stress" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/../.."
CXX=${CXX:-g++}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
build=build/sanitize
mkdir -p "$build"
flags=(-O1 -g -Icsrc -ffp-contract=off -fno-omit-frame-pointer -fno-sanitize-recover=all)
engine=(csrc/engine/*.cpp csrc/codec/*.cpp csrc/codec/isa/*.cpp)
torch=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2> /dev/null || true)
export TSAN_OPTIONS="halt_on_error=1 suppressions=tests/native/not_instrumented.txt ${TSAN_OPTIONS:-}"

engine_stress() {
  local binary="$build/engine_stress-${sanitizer//,/-}"
  "$CXX" "${flags[@]}" -fsanitize="$sanitizer" -std=c++17 tests/native/engine_stress.cpp "${engine[@]}" \
    csrc/lanes/cpu_lane.cpp csrc/lanes/inline_lane.cpp csrc/devices/cpu_device.cpp -o "$binary" -pthread
  "$binary"
}

exchange_stress() {
  if [ -z "$torch" ]; then
    echo "exchange_stress: skipped, because $PYTHON has no torch"
    return
  fi
  local folder="$build/exchange-${sanitizer//,/-}" python runtime
  mkdir -p "$folder"
  python=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  "$CXX" "${flags[@]}" -fsanitize="$sanitizer" -std=c++20 -shared -fPIC -fvisibility=hidden -isystem "$python" \
    -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" tests/native/bindings.cpp \
    csrc/transport/exchange.cpp csrc/transport/peer_sentinels.cpp -o "$folder/test_bindings.so" \
    -L"$torch/lib" -ltorch_python -ltorch -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib"
  # Python is linked with neither: the sanitizer's library must come first, and finds what it replaces in the other.
  runtime=$([ "$sanitizer" = thread ] && echo libtsan.so || echo libasan.so)
  LD_PRELOAD="$("$CXX" -print-file-name="$runtime") $("$CXX" -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS="detect_leaks=0 ${ASAN_OPTIONS:-}" "$PYTHON" tests/native/exchange_stress.py "$folder"
}

for sanitizer in ${SANITIZERS:-thread address,undefined}; do
  echo "== $sanitizer"
  for test in $tests; do "$test"; done
done
