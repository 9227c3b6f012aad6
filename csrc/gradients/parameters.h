// State that is kept for each parameter, whatever bucket it is in: its name, its wire, its residual, and how many of
// its elements were not finite.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "devices/device.h"
#include "gradients/residuals.h"

namespace fusedcomm {

// A count in the device's memory, of non-finite elements. It stays where it is, whatever buckets are rebuilt or moved.
struct DeviceCount {
  size_t index;
  int64_t taken = 0;  // what has been added elsewhere already
};

// Keyed by the parameter and not by its bucket, because buckets are rebuilt and renumbered.
struct ParameterState {
  at::Tensor parameter;  // held, so that its address is not reused
  std::string name;
  uint32_t number = 0;                    // in the order in which all ranks add parameters
  int wire = 0;                           // its wire's number, see engine/config.h
  std::atomic<int64_t> num_nonfinite{0};  // elements of local gradients that were not finite when packed
  std::optional<DeviceCount> on_device;   // where a device counts them; none before the first bucket

  // Error feedback: the residual of its bucket, null if there is none.
  std::shared_ptr<const ResidualBuffer> residual;
  // The element of its bucket's residual at which this parameter begins.
  int64_t residual_begin = 0;
  // The residual before a bucket has it: fp32 [numel()], in the unit of gradients. Undefined if there is none.
  at::Tensor loaded;
  // Loaded beside the residuals of its bucket, of which it is the first parameter; see ResidualBuffer::take().
  std::optional<EncoderResiduals> of_encoders;

  // Elements that it has in its bucket. A complex parameter counts twice, because its bucket has real elements.
  int64_t numel() const { return parameter.numel() * (parameter.is_complex() ? 2 : 1); }
  // Its residual: fp32 [numel()], in the unit of gradients. Undefined if there is none.
  at::Tensor left_out() const;
};

using ParameterStatePtr = std::shared_ptr<ParameterState>;
using ParameterNames = std::set<std::string>;

// Not thread-safe: the owner must let one thread in at a time.
class Parameters {
 public:
  struct Known {
    at::Tensor tensor;
    std::string name;
    int wire;
  };
  // If `known` is empty, parameters are added when they first appear in a bucket. They are then named by their number
  // and shape, and those with at most one dimension have wire number `wire_1d`. device: of the gradients. codec: the
  // same device, as the engine has it; must outlive this object's use.
  Parameters(const std::vector<Known>& known, int wire_1d, c10::Device device, Device* codec);

  // The state of a parameter, which is added if it is new.
  const ParameterStatePtr& state_of(const at::Tensor& parameter);
  // Adds a parameter under a name, if it is new. Its numel and name tell which loaded state is its own.
  void know(const at::Tensor& parameter, std::string name, int wire);
  bool knows(const at::Tensor& parameter) const { return states_.count(parameter.unsafeGetTensorImpl()) != 0; }
  // The number of the wire of a parameter that has no name.
  int wire_of(const at::Tensor& parameter) const { return parameter.dim() <= 1 ? wire_1d_ : 0; }
  // This rank's residuals by parameter name: fp32, in the unit of gradients. Parameters without a residual are missing,
  // and those that are not in `names`, if given.
  std::map<std::string, at::Tensor> residuals(const std::optional<ParameterNames>& names) const;
  // What belongs to residuals(), by the name of the first parameter of a bucket.
  std::map<std::string, EncoderResiduals> residuals_of_encoders() const;
  // Replaces all residuals, or those of `names`; one of these that is not in `residuals` has none afterwards. Throws
  // ValueError if a size differs, or if a name is unknown and no parameter of that name can appear later.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals, const std::optional<ParameterNames>& names,
                         const std::map<std::string, EncoderResiduals>& of_encoders = {});
  // Call it when every parameter has appeared in a bucket. Drops residuals loaded for parameters that never did, and
  // returns a warning that names one; empty if there are none.
  std::string drop_unclaimed_residuals();

  // The number of non-finite elements by parameter name; parameters without any are missing. On a device call
  // wait_for_lanes() before, or those under way may be missing.
  std::map<std::string, int64_t> nonfinite();
  // Throws ValueError if a name is unknown and no parameter of that name can appear later.
  void restore_nonfinite(const std::map<std::string, int64_t>& counts);

  // Where the device counts the non-finite elements of a parameter.
  int64_t* count_of(ParameterState* state);
  // Adds what the device has counted since the last call. Returns what it has counted in all. See nonfinite().
  int64_t take_device_counts();

 private:
  const ParameterStatePtr& add(const at::Tensor& parameter, std::string name, int wire);
  void add_counts();
  const ParameterStatePtr& add_new(const at::Tensor& parameter, std::string name, int wire);
  std::unordered_map<std::string, ParameterState*> by_name() const;

  const bool are_known_;  // false: they are added as they appear
  const int wire_1d_;
  const c10::Device device_;
  std::unordered_map<c10::TensorImpl*, ParameterStatePtr> states_;
  uint32_t next_number_ = 0;
  // Restored state of parameters that have not appeared yet, by name.
  std::unordered_map<std::string, at::Tensor> waiting_residuals_;
  std::unordered_map<std::string, EncoderResiduals> waiting_of_encoders_;
  std::unordered_map<std::string, int64_t> waiting_counts_;
  Device* const codec_;
  std::vector<std::shared_ptr<std::byte>> counts_;  // on the device: int64 [kNumCounts] in each block
  std::vector<DeviceCount> spare_;                  // that no parameter has
  int64_t num_nonfinite_on_device_ = 0;
};

}  // namespace fusedcomm
