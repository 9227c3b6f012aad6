// Submits gradients during the backward pass, each as soon as it is ready, from native hooks: without the GIL.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "frontends/reducer/accumulators.h"

namespace fusedcomm::horovod {

// Gradients that are summed in place, as one operation.
struct Submission {
  std::string name;                 // of the operation: that of its first parameter
  bool is_group = false;            // whether it is a grouped operation, which may still have one tensor
  std::vector<std::string> names;   // of the parameters
  std::vector<at::Tensor> tensors;  // contiguous; a gradient with its dimensions in another order is permuted
  int op = 0;
  double prescale = 1, postscale = 1;
  int set = 0;
  std::string wire;
};

// The hooks of one optimizer. Thread-safe. They stay until detach().
//
//   backward passes ──► a gradient's last pass ──► its unit is complete ──► submit()
//   synchronize: submit_missing(), take_handles(), wait for the handles, write_back()
class GradientSubmitter : public std::enable_shared_from_this<GradientSubmitter> {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
  };
  // Parameters, by index, that are submitted together.
  struct Unit {
    std::vector<size_t> parameters;
    bool is_group = false;
  };
  struct Options {
    int op = 0;
    double prescale = 1, postscale = 1;
    int set = 0;
    std::string wire;
    int64_t num_passes = 1;  // backward passes whose gradients are added up before they are submitted
  };
  // Begins an operation and returns its handle. Called on threads of autograd, or on that of submit_missing().
  using Submit = std::function<int(Submission)>;

  struct Submitted {
    int handle = -1;
    std::vector<size_t> parameters;
  };

  // units: each parameter is in exactly one. Throws ValueError if not, or if there are no passes.
  static std::shared_ptr<GradientSubmitter> make(std::vector<Parameter> parameters, std::vector<Unit> units,
                                                 const Options& options, Submit submit);

  // The number of operations that take_handles() would return.
  size_t outstanding() const;
  // Parameters whose unit has not been submitted.
  std::vector<size_t> missing() const;
  // Submits the units that are missing, in their order, except those with a sparse gradient. A missing gradient is sent
  // as zeros; the result becomes the parameter's `.grad`.
  void submit_missing();
  // Returns the operations in the order in which they were submitted, and begins the next step: every parameter has all
  // its passes again.
  std::vector<Submitted> take_handles();
  // Gives gradients their results where these were computed in a copy. Call it when what take_handles() has returned
  // has ended.
  void write_back();
  // From now on. What has been submitted is kept; other parameters have all passes again.
  void set_passes(int64_t num_passes);
  // Forgets what has been submitted, and begins the next step.
  void reset();
  // Removes the hooks. Idempotent.
  void detach();

 private:
  struct Gradient {
    int64_t passes_left = 1;
    at::Tensor tensor;     // what is submitted; undefined until the gradient is ready
    bool is_copy = false;  // whether `tensor` is not the memory of the parameter's gradient
  };
  struct UnitState {
    size_t num_ready = 0;
    bool is_submitted = false;
  };

  GradientSubmitter(std::vector<Parameter> parameters, std::vector<Unit> units, const Options& options, Submit submit);
  void add_hooks();
  void on_gradient(size_t index, const at::Tensor& added);

  // Call these with mutex_ held.
  // Sets the gradient's tensor. `added`: see bucket_gradient().
  void prepare(size_t index, const at::Tensor& added);
  // Does nothing if a gradient of the unit is sparse.
  void submit(size_t unit);
  void begin_step();
  void begin_step(size_t unit);

  const std::vector<Parameter> parameters_;
  const std::vector<Unit> units_;
  const Submit submit_;
  std::vector<size_t> unit_of_;  // by parameter

  mutable std::mutex mutex_;  // guards the members below
  Options options_;
  std::unique_ptr<Accumulators> accumulators_;  // null once detached
  std::vector<Gradient> gradients_;
  std::vector<UnitState> states_;  // of the units
  std::vector<Submitted> submitted_;
  std::vector<std::pair<size_t, at::Tensor>> copies_;  // results for write_back(), by parameter
};

}  // namespace fusedcomm::horovod
