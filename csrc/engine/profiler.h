// Lets a profiler see a bucket and its stages. The engine knows no profiler: the caller gives each job one of these
// (gradients/profiled_bucket.h), or none while nobody profiles.
#pragma once

#include <memory>
#include <string>

namespace fusedcomm {

// A range that a profiler sees; it ends when the last owner releases it.
using ProfilerRange = std::shared_ptr<void>;

class JobProfiler {
 public:
  virtual ~JobProfiler() = default;
  // Opens a range on the calling thread, which must also end it, after all ranges that it opens later.
  virtual ProfilerRange open(const std::string& name) const = 0;
  // Opens a range that any thread may end.
  virtual ProfilerRange open_async(const std::string& name) const = 0;
};

}  // namespace fusedcomm
