// Memory of the simulated accelerator, and the check that conflicting accesses to it are ordered.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "require.h"
#include "sim_accelerator.h"
#include "sim_stream.h"

namespace sim {

// An access to bytes [begin, end) of a block.
struct PastAccess {
  int64_t begin, end;
  bool writes;
  c10::StreamId stream;
  int64_t index;
  std::string what;
};

constexpr std::align_val_t kCacheLine{64};
struct Delete {
  void operator()(std::byte* data) const { ::operator delete(data, kCacheLine); }
};

// Memory of allocate(). It is freed by reset(), so that an access after it was given back is found.
struct Block {
  std::unique_ptr<std::byte, Delete> memory;
  int64_t nbytes;
  c10::StreamId home;
  std::set<c10::StreamId> users;  // streams of record_use()
  bool is_given_back = false;
  std::vector<PastAccess> past;
  std::vector<std::byte> enqueued;  // see note_copy()
};
using Blocks = std::map<const std::byte*, Block>;  // by address

// The block that `data` points into; null if there is none. The caller has locked the device.
inline Block* block_of(Blocks* blocks, const void* data) {
  const auto* const at = static_cast<const std::byte*>(data);
  auto after = blocks->upper_bound(at);
  if (after == blocks->begin()) return nullptr;
  auto& [begin, block] = *--after;
  return at < begin + block.nbytes ? &block : nullptr;
}

// Ends the test if work on stream `id`, whose clock this is, is not ordered after conflicting earlier work. The caller
// has locked the device.
//
// An earlier access is dropped if everything that conflicts with it also conflicts with the new one: work that is
// ordered after the new access is then ordered after both.
inline void check_order(Blocks* blocks, Clock* clock, c10::StreamId id, const std::string& what,
                        const std::vector<Access>& accesses) {
  const int64_t index = ++(*clock)[id];
  for (const Access& access : accesses) {
    if (access.nbytes == 0) continue;
    Block* const block = block_of(blocks, access.memory);
    REQUIRE(block, "\"%s\" accesses what is not memory of its device", what.c_str());
    REQUIRE(!block->is_given_back, "memory was given back before \"%s\" on stream %d was enqueued", what.c_str(),
            static_cast<int>(id));
    const int64_t begin = static_cast<const std::byte*>(access.memory) - block->memory.get();
    const PastAccess now{begin, begin + access.nbytes, access.writes, id, index, what};
    REQUIRE(now.end <= block->nbytes, "\"%s\" accesses byte %ld of %ld", what.c_str(), static_cast<long>(now.end - 1),
            static_cast<long>(block->nbytes));
    for (const PastAccess& earlier : block->past) {
      const bool overlap = earlier.begin < now.end && now.begin < earlier.end;
      if (!overlap || (!earlier.writes && !now.writes)) continue;
      REQUIRE(earlier.index <= (*clock)[earlier.stream],
              "a race: \"%s\" on stream %d is not ordered after \"%s\" on stream %d", what.c_str(),
              static_cast<int>(id), earlier.what.c_str(), static_cast<int>(earlier.stream));
    }
    std::erase_if(block->past, [&](const PastAccess& earlier) {
      const bool covered = now.begin <= earlier.begin && earlier.end <= now.end;
      return covered && (now.writes || (earlier.stream == id && !earlier.writes));
    });
    block->past.push_back(now);
  }
}

}  // namespace sim
