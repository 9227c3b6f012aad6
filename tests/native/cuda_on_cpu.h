// Just enough of CUDA C++ to run a kernel on the CPU, exactly as written, for tests: include this, then the .cu file,
// then CUDA_ON_CPU_EXPORT(kernel), and load the library with ctypes.
//
// Every CUDA thread is a fiber with a stack of its own. One runs until it needs the others of its warp (a shuffle, a
// vote) or of its block (__syncthreads), then the next one does; blocks run one after the other. What the hardware
// would not forgive is counted as a fault: lanes of a warp that meet in different operations, a barrier that some
// threads never reach, and, where compiled with -fsanitize=alignment, accesses that are not aligned. Warps take turns
// forwards, then backwards, so that a missing __syncthreads shows.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

namespace cuda_on_cpu {

struct Index {
  unsigned x = 0;
};

enum class Op { kNone, kShuffle, kVote, kSyncThreads, kExit };

struct Fiber {
  static constexpr size_t kStackNbytes = 64 * 1024;

  char* stack = static_cast<char*>(std::malloc(kStackNbytes));
  ucontext_t entry;
  jmp_buf resume_at;
  bool started = false;
  Op op = Op::kNone;  // what it waits in
  unsigned num_exchanges = 0;
};

struct Warp {
  uint64_t slots[2][32];  // two: a lane may be one exchange ahead of another, never two
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::function<void()> body;
inline unsigned current;  // fiber
inline jmp_buf scheduler;
inline int num_faults;

inline void fault(const char* what) {
  if (++num_faults <= 5) std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
}

// The others run until they are where this one is.
inline void wait(Op op) {
  Fiber& fiber = fibers[current];
  fiber.op = op;
  if (_setjmp(fiber.resume_at) == 0) _longjmp(scheduler, 1);
}

inline void fiber_main() {
  body();
  fibers[current].op = Op::kExit;
  _longjmp(scheduler, 1);
}

// Every lane's value, once all have arrived.
template <class T>
const uint64_t* exchange(Op op, unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a slot");
  if (mask != 0xFFFFFFFFu) fault("only whole warps take part");
  Fiber& fiber = fibers[current];
  uint64_t* slots = warps[current / 32].slots[fiber.num_exchanges++ % 2];
  std::memcpy(&slots[current % 32], &value, sizeof(value));
  wait(op);
  return slots;
}

template <class T>
T from_slot(uint64_t slot) {
  T value;
  std::memcpy(&value, &slot, sizeof(value));
  return value;
}

}  // namespace cuda_on_cpu

inline cuda_on_cpu::Index threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

inline void resume(unsigned index) {
  current = index;
  threadIdx.x = index;
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[index];
  if (fiber.started) _longjmp(fiber.resume_at, 1);
  fiber.started = true;
  setcontext(&fiber.entry);
}

// Until every lane waits for the block or has ended.
inline bool run_warp(unsigned warp) {
  for (unsigned turn = 0;; ++turn) {
    for (unsigned k = 0; k < 32; ++k) {
      const unsigned lane = turn % 2 ? 31 - k : k;
      if (fibers[warp * 32 + lane].op != Op::kExit) resume(warp * 32 + lane);
    }
    const Op op = fibers[warp * 32].op;
    for (unsigned lane = 1; lane < 32; ++lane) {
      if (fibers[warp * 32 + lane].op != op) {
        fault("lanes of a warp diverged before an operation of the whole warp");
        return false;
      }
    }
    if (op == Op::kSyncThreads || op == Op::kExit) return true;
  }
}

inline void run_block(unsigned num_threads) {
  while (fibers.size() < num_threads) fibers.emplace_back();
  warps.assign(num_threads / 32, Warp{});
  for (unsigned k = 0; k < num_threads; ++k) {
    Fiber& fiber = fibers[k];
    fiber.started = false;
    fiber.op = Op::kNone;
    fiber.num_exchanges = 0;
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack;
    fiber.entry.uc_stack.ss_size = Fiber::kStackNbytes;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, fiber_main, 0);
  }
  for (bool backwards = blockIdx.x % 2;; backwards = !backwards) {
    for (unsigned k = 0; k < warps.size(); ++k) {
      if (!run_warp(backwards ? warps.size() - 1 - k : k)) return;
    }
    for (unsigned k = 32; k < num_threads; k += 32) {
      if (fibers[k].op != fibers[0].op) {
        fault("__syncthreads that some threads never reach");
        return;
      }
    }
    if (fibers[0].op == Op::kExit) return;
  }
}

template <class... Params, size_t... kIndices>
void call(void (*kernel)(Params...), void** params, std::index_sequence<kIndices...>) {
  kernel(*static_cast<Params*>(params[kIndices])...);
}

// `params` as for cuLaunchKernel: a pointer to each. Returns the number of faults.
template <class... Params>
int launch(void (*kernel)(Params...), unsigned num_threads, unsigned num_blocks, void** params) {
  num_faults = 0;
  blockDim.x = num_threads;
  gridDim.x = num_blocks;
  body = [=] { call(kernel, params, std::index_sequence_for<Params...>()); };
  for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) run_block(num_threads);
  return num_faults;
}

}  // namespace cuda_on_cpu

#define CUDA_ON_CPU_EXPORT(kernel)                                                                                 \
  extern "C" __attribute__((visibility("default"))) int launch_##kernel(unsigned num_threads, unsigned num_blocks, \
                                                                        void** params) {                           \
    return cuda_on_cpu::launch(kernel, num_threads, num_blocks, params);                                           \
  }

// Called by code that was compiled with -fsanitize=alignment; defined here, so the sanitizer's library is not needed.
extern "C" inline __attribute__((used)) void __ubsan_handle_type_mismatch_v1(void*, void*) {
  cuda_on_cpu::fault("an access that is not aligned");
}

// ---- device functions

inline void __syncthreads() { cuda_on_cpu::wait(cuda_on_cpu::Op::kSyncThreads); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return cuda_on_cpu::from_slot<T>(cuda_on_cpu::exchange(cuda_on_cpu::Op::kShuffle, mask, value)[source & 31]);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const unsigned lane = threadIdx.x % 32;
  return cuda_on_cpu::from_slot<T>(cuda_on_cpu::exchange(cuda_on_cpu::Op::kShuffle, mask, value)[lane ^ lanes]);
}

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const uint64_t* slots = cuda_on_cpu::exchange<uint64_t>(cuda_on_cpu::Op::kVote, mask, predicate);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(slots[lane] & 1) << lane;
  return ballot;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::from_slot<float>(bits); }

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  const unsigned long long old = *address;
  *address += value;
  return old;
}

// cvt.rn.f16.f32 and back.
inline uint16_t half_of_float(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(value);
  if (value != value) return 0x7FFF;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00u);  // half an ulp over the greatest
  // Subnormals: whole numbers of 2^-24, half to even. Else half an ulp less one, plus the lowest kept bit, carries.
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<unsigned>(std::nearbyint(magnitude * 0x1p24f)));
  return static_cast<uint16_t>(sign | ((((bits & 0x7FFFFFFFu) + 0xFFFu + (bits >> 13 & 1u)) >> 13) - (112u << 10)));
}

inline float float_of_half(uint16_t half) {
  const unsigned magnitude = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7C00u << 13) return __uint_as_float(sign | 0x70000000u | magnitude);
  return __uint_as_float(sign | magnitude) * 0x1p112f;
}
