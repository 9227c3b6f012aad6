#!/usr/bin/env bash
# Builds the engine and the codec, which know nothing of torch, with each sanitizer and runs the stress test.
set -euo pipefail
cd "$(dirname "$0")/../.."
CXX=${CXX:-g++}
build=build/sanitize
mkdir -p "$build"
sources=(tests/native/engine_stress.cpp csrc/engine.cpp csrc/plan.cpp csrc/cpu_lane.cpp csrc/inline_lane.cpp csrc/cpu_device.cpp
         csrc/codec.cpp csrc/codec_portable.cpp csrc/codec_avx2.cpp csrc/codec_avx512.cpp csrc/codec_neon.cpp)
for sanitizer in ${SANITIZERS:-thread address,undefined}; do
  binary="$build/engine_stress-${sanitizer//,/-}"
  echo "== $sanitizer"
  "$CXX" -std=c++17 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -fsanitize="$sanitizer" \
    -fno-sanitize-recover=all "${sources[@]}" -o "$binary" -pthread
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$binary"
done
