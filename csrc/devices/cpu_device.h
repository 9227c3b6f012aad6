// The device for gradients in host memory: the CPU codec, on threads of our own.
#pragma once

#include <memory>
#include <string>

#include "codec/codec.h"
#include "devices/device.h"

namespace fusedcomm {

class CpuDevice : public Device {
 public:
  // forced_sync: every stage runs on the thread that submits the bucket, and ends before the next begins.
  CpuDevice(const std::string& isa, int num_threads, bool forced_sync = false)
      : codec_(isa, num_threads), forced_sync_(forced_sync) {}

  const std::string& isa() const override { return codec_.isa(); }
  std::unique_ptr<Lane> make_lane(LaneRole role) override;
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;
  StampPtr stamp() override;

  int64_t pack(const PackArgs& args) override { return codec_.pack(args); }
  void reduce(const ReduceArgs& args) override { codec_.reduce(args); }
  void unpack(const UnpackArgs& args) override { codec_.unpack(args); }
  int64_t scale_in_place(const BucketSlices& slices, float scale) override {
    return codec_.scale_in_place(slices.lossy, scale);
  }
  void add_heads(const std::byte* heads, int64_t stride, int64_t num_heads, std::byte* sums, int64_t stride_of_sums,
                 int64_t num_sums) override;

 private:
  Codec codec_;
  const bool forced_sync_;
};

// The present moment of the host's clock.
StampPtr host_stamp();

}  // namespace fusedcomm
