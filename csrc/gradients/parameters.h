// What is kept by parameter, whatever bucket it comes in: its name and wire, what error feedback has left out of it,
// and how many of its elements were not finite.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "codec/args.h"
#include "gradients/residuals.h"

namespace fusedcomm {

// Keyed by the parameter, never by its bucket: buckets are rebuilt and renumbered.
struct ParameterState {
  at::Tensor parameter;  // held, so that its address stays its own
  std::string name;
  uint32_t number = 0;                    // in the order in which all ranks met them
  int wire = 0;                           // its number, see engine/config.h
  std::atomic<int64_t> num_nonfinite{0};  // elements of local gradients that were not finite when packed

  // Error feedback: what has been left out of it is at `residual_begin` of its bucket's, or, before it has a bucket, in
  // `loaded`, fp32 in the unit of gradients.
  std::shared_ptr<const StreamResidual> residual;
  int64_t residual_begin = 0;
  at::Tensor loaded;

  // Elements it has in its bucket's buffer: complex buckets arrive as floats of twice the numel.
  int64_t numel() const { return parameter.numel() * (parameter.is_complex() ? 2 : 1); }
  // fp32 [numel()], in the unit of gradients; undefined if it is nothing.
  at::Tensor left_out() const;
};

using ParameterStatePtr = std::shared_ptr<ParameterState>;

// Whoever has it sees to it that one thread at a time is here.
class Parameters {
 public:
  struct Known {
    at::Tensor tensor;
    std::string name;
    int wire;
  };
  // If none are known they turn up with their buckets, are named by their shape, and have `wire_1d` if they have at
  // most one dimension. device: where the gradients are.
  Parameters(const std::vector<Known>& known, int wire_1d, c10::Device device);

  const ParameterStatePtr& state_of(const at::Tensor& parameter);
  // Before any has turned up: those that have turned up there have the same names and numbers here.
  void name_like(const std::vector<ParameterStatePtr>& theirs);
  std::vector<ParameterStatePtr> states() const;

  // What this rank has left out so far, fp32 in the unit of gradients, by name. Those are missing that nothing is left
  // out of.
  std::map<std::string, at::Tensor> residuals() const;
  // Of those that are not named nothing is left out. Throws ValueError where a name or a size is not ours.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals);
  // All have turned up. What is to be said to the user of residuals whose parameters have not; empty if there are none.
  std::string end_of_waiting();

  // By name; those are missing that have none.
  std::map<std::string, int64_t> nonfinite();
  // Throws ValueError where a name is not ours.
  void restore_nonfinite(const std::map<std::string, int64_t>& counts);

  // The tables count what is not finite, of these in this order.
  void count_with(std::shared_ptr<const BucketTables> tables, std::vector<ParameterStatePtr> states);
  // Adds what tables have counted since the last time, for which it waits; returns all that they have ever counted.
  int64_t take_device_counts();

 private:
  const ParameterStatePtr& add(const at::Tensor& parameter, std::string name, uint32_t number, int wire);
  int wire_of(const at::Tensor& parameter) const { return parameter.dim() <= 1 ? wire_1d_ : 0; }
  std::unordered_map<std::string, ParameterState*> by_name() const;

  // Tables whose bucket may have been rebuilt since.
  struct Counted {
    std::shared_ptr<const BucketTables> tables;
    std::vector<ParameterStatePtr> states;  // in the order of the counts
    std::vector<int64_t> taken;
  };

  const bool are_known_;  // else they turn up
  const int wire_1d_;
  const c10::Device device_;
  std::unordered_map<c10::TensorImpl*, ParameterStatePtr> states_;
  // By name: restored for parameters that have not turned up yet.
  std::unordered_map<std::string, at::Tensor> waiting_residuals_;
  std::unordered_map<std::string, int64_t> waiting_counts_;
  std::vector<Counted> counted_;
  int64_t num_nonfinite_on_device_ = 0;
};

}  // namespace fusedcomm
