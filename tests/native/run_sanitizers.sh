#!/usr/bin/env bash
# Builds the engine, the codec and the exchange with each sanitizer and runs the stress programs:
#   engine_stress    lanes are threads; needs no torch
#   exchange_stress  messages between ranks; needs torch
# The test that needs torch is skipped if PYTHON has none. torch itself is not instrumented, and need not be: the
# backend, and the code that orders messages, are built here and are instrumented.
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

# run NAME FLAGS...: compiles tests/native/NAME.cpp with these flags and sources, and runs it.
run() {
  local name=$1 binary="$build/$1-${sanitizer//,/-}"
  shift
  if [[ "$tests" != *" $name "* ]]; then return; fi
  if [[ "$*" == *"$torch/include"* && -z "$torch" ]]; then
    echo "$name: skipped, because $PYTHON has no torch"
    return
  fi
  "$CXX" "${flags[@]}" -fsanitize="$sanitizer" "tests/native/$name.cpp" "$@" -o "$binary" -pthread
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$binary"
}

for sanitizer in ${SANITIZERS:-thread address,undefined}; do
  echo "== $sanitizer"
  run engine_stress -std=c++17 "${engine[@]}" csrc/lanes/cpu_lane.cpp csrc/lanes/inline_lane.cpp \
    csrc/devices/cpu_device.cpp
  run exchange_stress -std=c++20 -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    csrc/transport/exchange.cpp csrc/transport/peer_sentinels.cpp \
    -L"$torch/lib" -ltorch -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib"
done
