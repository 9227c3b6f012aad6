#!/usr/bin/env bash
# Builds the engine, the codec and the exchange with each sanitizer and runs the stress tests:
#   engine_stress    lanes are threads; needs no torch
#   stream_stress    lanes are simulated streams; needs torch
#   exchange_stress  messages between ranks; needs torch
# The tests that need torch are skipped if PYTHON has none. torch itself is not instrumented, and need not be: the
# simulated device and backend, and the code that orders their streams, events and messages, are built here and are
# instrumented.
#
# Environment variables: CXX, PYTHON, and SANITIZERS, a list of -fsanitize values separated by spaces.
set -euo pipefail
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

run() {
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$1"
}

for sanitizer in ${SANITIZERS:-thread address,undefined}; do
  echo "== $sanitizer"
  binary="$build/engine_stress-${sanitizer//,/-}"
  "$CXX" -std=c++17 "${flags[@]}" -fsanitize="$sanitizer" tests/native/engine_stress.cpp "${engine[@]}" \
    csrc/lanes/cpu_lane.cpp csrc/lanes/inline_lane.cpp csrc/devices/cpu_device.cpp -o "$binary" -pthread
  run "$binary"
  if [ -z "$torch" ]; then
    echo "stream_stress and exchange_stress: skipped, because $PYTHON has no torch"
    continue
  fi
  binary="$build/stream_stress-${sanitizer//,/-}"
  "$CXX" -std=c++20 "${flags[@]}" -fsanitize="$sanitizer" -isystem "$torch/include" \
    tests/native/stream_stress.cpp tests/native/sim_accelerator.cpp csrc/devices/stream_lane.cpp csrc/devices/stream_device.cpp \
    csrc/lanes/inline_lane.cpp csrc/lanes/cpu_lane.cpp csrc/devices/cpu_device.cpp "${engine[@]}" \
    -o "$binary" -pthread -L"$torch/lib" -lc10 -Wl,-rpath,"$torch/lib"
  run "$binary"
  binary="$build/exchange_stress-${sanitizer//,/-}"
  "$CXX" -std=c++20 "${flags[@]}" -fsanitize="$sanitizer" -isystem "$torch/include" \
    -isystem "$torch/include/torch/csrc/api/include" \
    tests/native/exchange_stress.cpp csrc/transport/exchange.cpp csrc/transport/peer_sentinels.cpp \
    -o "$binary" -pthread -L"$torch/lib" -ltorch -ltorch_cpu -lc10 -Wl,-rpath,"$torch/lib"
  run "$binary"
done
