// The engine's interface to the device that holds the gradients: lanes, scratch memory, time stamps and the codec
// stages. cpu_device.h and cuda_device.h implement it; a new device is another subclass, not another engine.
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

  // The instruction set or architecture on which the codec stages run, as text for users.
  virtual const std::string& isa() const = 0;
  // Whether lanes for collectives may run codec stages, too. Lanes without a thread or stream of their own must not.
  virtual bool wire_runs_stages() const { return false; }
  // With wire_runs_stages(): a bucket of one chunk runs all its stages on the wire's lane if its gradients have at most
  // so many bytes.
  virtual int64_t max_nbytes_on_wire() const { return 0; }
  // Makes the lane of a role; lanes of several roles may share a stream. The device must outlive the lane.
  virtual std::unique_ptr<Lane> make_lane(LaneRole role) = 0;
  // Returns zeroed memory, aligned to at least 64 bytes. It is freed with its last owner.
  virtual std::shared_ptr<std::byte> allocate(int64_t nbytes) = 0;

  // Keeps a tensor's memory from being reused while our lanes may still access it, or only the wire's lanes: a backward
  // pass that fails does not wait for them. On a CPU this does nothing, because a job's owner keeps the memory.
  virtual void will_use(const at::Tensor&, bool /*by_wire_only*/) const {}
  void will_use(const at::Tensor& tensor) const { will_use(tensor, /*by_wire_only=*/false); }

  // Throws if buckets cannot be taken from the calling thread now, e.g. because it captures a CUDA graph.
  virtual void check_caller() const {}
  // The end of what the calling thread has enqueued so far, gradients included; within a lane's task, of what that lane
  // has been given.
  virtual Moment moment() { return {nullptr, stamp()}; }
  // The stamp of that moment.
  virtual StampPtr stamp() = 0;
  // Call it once on a thread that uses the device only to ask whether stamps have been reached.
  virtual void enter_watching_thread() const {}
  // With forced synchronization, waits until the work of this lane's task has ended, and throws its error. Otherwise
  // does nothing.
  virtual void settle() {}

  // Whether pack() and scale_in_place() count elements that are not finite in the device's memory, and return 0.
  virtual bool counts_in_memory() const { return false; }
  // Copies int64 [num] of such counts, memory of allocate(), to the host. Call it after wait_for_lanes().
  virtual std::vector<int64_t> read_counts(const int64_t* /*counts*/, int64_t /*num*/) const { return {}; }
  // Waits until the lanes have ended what they have been given.
  virtual void wait_for_lanes() const {}
  // Makes the device's tables of a bucket of these slices; null if the device needs none. grad_nbytes: bytes of a
  // gradient's element. counts: where elements of each slice that is no hole are counted, the lossy slices first; empty
  // if the bucket is not packed.
  virtual std::shared_ptr<const BucketTables> prepare(const BucketLayout&, const std::vector<SlicePlace>& /*lossy*/,
                                                      const std::vector<SlicePlace>& /*exact*/, int64_t /*grad_nbytes*/,
                                                      const std::vector<int64_t*>& /*counts*/) {
    return nullptr;
  }

  // Call these from within a lane's task. pack() and scale_in_place() return how many elements were not finite; see
  // counts_in_memory().
  virtual int64_t pack(const PackArgs& args) = 0;
  virtual void reduce(const ReduceArgs& args) = 0;
  virtual void unpack(const UnpackArgs& args) = 0;
  virtual int64_t scale_in_place(const BucketSlices& slices, float scale) = 0;
  // Adds up heads and writes the sum to each place. Strides are bytes.
  virtual void add_heads(const std::byte* heads, int64_t stride, int64_t num_heads, std::byte* sums,
                         int64_t stride_of_sums, int64_t num_sums) = 0;

  // Opens and closes a named range around a stage, for profilers.
  virtual void range_push(const std::string& /*name*/) {}
  virtual void range_pop() {}
};

}  // namespace fusedcomm
