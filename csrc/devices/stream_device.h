// A device whose work runs on three streams of our own. This class makes the streams, the events between them and the
// stamps. A subclass adds memory and kernels.
//
//   pack stream     waits for the gradients' stream, then pack
//   wire stream     all collectives, and the sums of a bucket of one chunk, which lie between two of them
//   unpack stream   other sums, unpack; a bucket's future is completed on it
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <vector>

#include "devices/device.h"
#include "devices/stream_lane.h"

namespace fusedcomm {

class StreamDevice : public Device {
 public:
  // forced_sync: the host waits for every stage, so an error is reported at the stage that caused it. `device` may be
  // the CPU: then there are no streams, and each stage ends before the next begins.
  StreamDevice(c10::Device device, bool forced_sync);

  std::unique_ptr<Lane> make_lane(LaneRole role) override;
  bool wire_runs_stages() const override { return on_streams(); }
  Moment caller_moment() override;
  StampPtr stamp() override;
  void enter_watching_thread() const override;
  void settle() override;

  // pack, wire, unpack; none on CPU.
  const std::vector<c10::Stream>& streams() const { return streams_; }

 protected:
  c10::Stream current_stream() const;
  bool on_streams() const { return !streams_.empty(); }

  const c10::Device device_;

 private:
  const bool forced_sync_;
  std::vector<c10::Stream> streams_;
  std::vector<std::shared_ptr<LaneStream>> lane_streams_;  // the same streams, in the same order
  const std::shared_ptr<StreamEvents> events_ = std::make_shared<StreamEvents>();
};

}  // namespace fusedcomm
