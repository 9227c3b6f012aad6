// What the engine asks of the device that holds the gradients: lanes to run on, scratch memory, and the three codec
// stages. The CPU's is below; another device is another subclass, not another engine.
#pragma once

#include <memory>
#include <string>

#include "codec.h"
#include "lane.h"

namespace fusedcomm {

class Device {
 public:
  virtual ~Device() = default;

  // Which code the codec stages run, for people: an instruction set, an architecture.
  virtual const std::string& isa() const = 0;
  virtual std::unique_ptr<Lane> make_lane(const std::string& name) = 0;
  // Aligned to at least 64 bytes and zeroed; freed with the last owner.
  virtual std::shared_ptr<std::byte> allocate(int64_t nbytes) = 0;

  // Called from within a lane's task. The counts are of non-finite elements.
  virtual int64_t pack(const PackArgs& args) = 0;
  virtual void reduce(const ReduceArgs& args) = 0;
  virtual void unpack(const UnpackArgs& args) = 0;
  virtual int64_t scale_in_place(const Stream& stream, float scale) = 0;
};

class CpuDevice : public Device {
 public:
  CpuDevice(const std::string& isa, int num_threads) : codec_(isa, num_threads) {}

  const std::string& isa() const override { return codec_.isa(); }
  std::unique_ptr<Lane> make_lane(const std::string& name) override;
  std::shared_ptr<std::byte> allocate(int64_t nbytes) override;

  int64_t pack(const PackArgs& args) override { return codec_.pack(args); }
  void reduce(const ReduceArgs& args) override { codec_.reduce(args); }
  void unpack(const UnpackArgs& args) override { codec_.unpack(args); }
  int64_t scale_in_place(const Stream& stream, float scale) override { return codec_.scale_in_place(stream, scale); }

 private:
  Codec codec_;
};

}  // namespace fusedcomm
