// A device whose work runs on streams of our own: three, or five if sums have two levels. This class makes the streams,
// the events between them and the stamps. A subclass adds memory and kernels.
//
//   pack stream     waits for the gradients' stream, then pack
//   wire stream     all collectives; the sums of a bucket of one chunk, which lie between two of them; all stages of
//                   a small bucket, whose future is completed on it
//   unpack stream   other sums, unpack; the futures of other buckets are completed on it
//
// On two levels the wire stream has the first sums, those within hosts. Two more streams let the links of a host and
// those between hosts carry different buckets at the same time:
//
//   cross stream    collectives between hosts, and the sums over hosts
//   spread stream   the all-gathers within a host that follow
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "devices/device.h"
#include "devices/stream_lane.h"

namespace fusedcomm {

// The stream that this thread's work on an accelerator goes to.
c10::Stream current_stream_of(c10::Device device);

class StreamDevice : public Device {
 public:
  // two_levels: whether sums may have two levels. forced_sync: the host waits for every stage, so an error is reported
  // at the stage that caused it. `device` may be the CPU: then there are no streams, and each stage ends before the
  // next begins.
  StreamDevice(c10::Device device, bool two_levels, bool forced_sync);
  // Leaves its streams to later devices of this process, which take those that are idle then: a query here would spoil
  // a CUDA graph that somebody captures. torch's pool has 32 of a priority and then gives the same ones again: those of
  // a tenth session would be FSDP2's, too.
  ~StreamDevice() override;

  std::unique_ptr<Lane> make_lane(LaneRole role) override;
  bool wire_runs_stages() const override { return on_streams(); }
  // Pack and unpack of 2 MiB read and write 6 MiB, 3 us at 2 TB/s, for which the wire carries nothing else. They save
  // the host two records and two waits, 1.2 us a pair, and five switches of the stream: more than 3 us of the thread
  // that runs the backward pass.
  int64_t max_nbytes_on_wire() const override { return int64_t{2} << 20; }
  Moment moment() override;
  StampPtr stamp() override { return moment().stamp; }
  void enter_watching_thread() const override;
  void wait_for_lanes() const override;
  void settle() override;

  // pack, wire, unpack, and for sums on two levels cross and spread; none on CPU.
  const std::vector<c10::Stream>& streams() const { return streams_; }
  // Of these the one for a role's lane. Not on CPU.
  const c10::Stream& stream_of(LaneRole role) const { return streams_.at(index_of(role)); }

 protected:
  c10::Stream current_stream() const;
  bool on_streams() const { return !streams_.empty(); }
  // Only with on_streams().
  const c10::Stream& wire_stream() const { return stream_of(LaneRole::kScatter); }

  const c10::Device device_;

 private:
  static size_t index_of(LaneRole role);

  const bool forced_sync_;
  std::vector<c10::Stream> streams_;
  std::vector<std::shared_ptr<LaneStream>> lane_streams_;  // the same streams, in the same order
  const std::shared_ptr<StreamEvents> events_ = std::make_shared<StreamEvents>();
};

}  // namespace fusedcomm
