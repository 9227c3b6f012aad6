// The part of CUDA C++ that is needed to run our kernels on the CPU, exactly as written, in tests. Include this header,
// then the .cu file, then write CUDA_ON_CPU_EXPORT(kernel), and load the library with ctypes.
//
// Every CUDA thread is a fiber with its own stack. A fiber runs until it needs the other threads of its warp (a
// shuffle, a vote) or of its block (__syncthreads); then the next fiber runs. Blocks run one after the other.
//
// Errors that hardware does not tolerate are counted as faults:
//   - lanes of a warp that meet in different operations,
//   - a barrier that some threads never reach,
//   - accesses that are not aligned, if compiled with -fsanitize=alignment.
//
// The warps of a block run in ascending order up to one barrier and in descending order up to the next, so that a
// missing __syncthreads gives wrong results.
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
  Op op = Op::kNone;  // the operation in which the fiber waits
  unsigned num_exchanges = 0;
};

struct Warp {
  uint64_t slots[2][32];  // two rows, because a lane may be one exchange ahead of another, but never two
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::function<void()> body;
inline unsigned current;  // index of the running fiber
inline jmp_buf scheduler;
inline int num_faults;

inline void fault(const char* what) {
  if (++num_faults <= 5) std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
}

// Lets the other fibers run until they have reached the same operation.
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

// Returns the values of all lanes, after all of them have arrived.
template <class T>
const uint64_t* exchange(Op op, unsigned mask, T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a slot");
  if (mask != 0xFFFFFFFFu) fault("a shuffle or vote of only a part of a warp");
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

// Runs a warp until every lane waits for the block or has ended. Returns false after a fault.
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

// `params`: a pointer to each argument, as cuLaunchKernel takes them. Returns the number of faults.
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

// Code compiled with -fsanitize=alignment calls this. The definition here makes the sanitizer's library unnecessary.
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

// Rounds to fp16 as cvt.rn.f16.f32 does.
inline uint16_t half_of_float(float value) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u;
  const float magnitude = std::fabs(value);
  if (value != value) return 0x7FFF;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00u);  // half an ulp above the largest fp16
  // Subnormals are multiples of 2^-24; nearbyint() rounds halves to even. For other values, the addition of half an ulp
  // minus one, plus the lowest kept bit, carries into the kept bits exactly when the value rounds up.
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<unsigned>(std::nearbyint(magnitude * 0x1p24f)));
  return static_cast<uint16_t>(sign | ((((bits & 0x7FFFFFFFu) + 0xFFFu + (bits >> 13 & 1u)) >> 13) - (112u << 10)));
}

inline float float_of_half(uint16_t half) {
  const unsigned magnitude = (half & 0x7FFFu) << 13, sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7C00u << 13) return __uint_as_float(sign | 0x70000000u | magnitude);
  return __uint_as_float(sign | magnitude) * 0x1p112f;
}
