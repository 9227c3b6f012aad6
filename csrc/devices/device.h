// What the engine asks of the device that holds the gradients: lanes to run on, scratch memory, the time, and the codec
// stages. cpu_device.h and cuda_device.h have one each; a new device is another subclass, not another engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codec/args.h"
#include "devices/slice_table.h"
#include "lanes/lane.h"

namespace at {
class Tensor;
}

namespace fusedcomm {

class Device {
 public:
  virtual ~Device() = default;

  // What the codec stages run on, for people: an instruction set, an architecture.
  virtual const std::string& isa() const = 0;
  // Whether lanes for collectives may run codec stages, too. Queues without a thread of their own must not.
  virtual bool wire_runs_stages() const { return false; }
  // Lives as long as the device does; roles may share a stream.
  virtual std::unique_ptr<Lane> make_lane(LaneRole role) = 0;
  // Aligned to at least 64 bytes and zeroed; freed with the last owner.
  virtual std::shared_ptr<std::byte> allocate(int64_t nbytes) = 0;

  // Keeps a tensor's memory from being given to somebody else while our lanes may still be at it: a backward pass that
  // dies waits for nothing. Where lanes are threads, the job's owner does that.
  virtual void will_use(const at::Tensor&) const {}

  // Throws if buckets cannot be taken over as the calling thread hands them over now.
  virtual void check_caller() const {}
  // The end of what the calling thread has enqueued so far, gradients included.
  virtual Moment caller_moment() { return {nullptr, stamp()}; }
  // Now, for the calling thread; within a lane's task, on that lane.
  virtual StampPtr stamp() = 0;
  // Called once on a thread that does nothing with the device but ask whether stamps have been reached.
  virtual void enter_watching_thread() const {}
  // Under forced synchronisation, returns when the work of this lane's task has ended, or throws what it died of.
  virtual void settle() {}

  // Tables of a bucket whose streams consist of these slices; null where they would serve nothing.
  virtual std::shared_ptr<const BucketTables> prepare(const BucketLayout&, const std::vector<SlicePlace>& /*lossy*/,
                                                      const std::vector<SlicePlace>& /*exact*/) {
    return nullptr;
  }

  // Called from within a lane's task. The counts are of non-finite elements; 0 where the tables count them.
  virtual int64_t pack(const PackArgs& args) = 0;
  virtual void reduce(const ReduceArgs& args) = 0;
  virtual void unpack(const UnpackArgs& args) = 0;
  virtual int64_t scale_in_place(const BucketStreams& streams, float scale, bool is_last) = 0;

  // A named range around a stage, for profilers that show them.
  virtual void range_push(const std::string& /*name*/) {}
  virtual void range_pop() {}
};

}  // namespace fusedcomm
