// What a backward pass does to the means beside writing them: adds up their squares, for norms and clipping, and takes
// a loss scale out of them. Also knows for which gradients these sums still hold.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace fusedcomm {

class PassEpilogue {
 public:
  // What a bucket has to do.
  struct Task {
    bool sums_squares = false;
    float unscale = 1;  // multiplies the means
    int64_t pass = 0;   // for set_squares()
  };

  // From the next pass on Σg² is known. `in_unpack`: whether gradients will be what unpack writes; if not, they are
  // read when Σg² is asked for.
  void want_squares(bool in_unpack);
  // Multiplies the means of the next pass. Called once for each scaled loss.
  void set_unscale(float unscale);
  // Whether a pass without set_unscale() is an error, because a loss scale would stay in its gradients.
  void require_unscale(bool required);
  // Takes over what the calls above have asked `from` for. Call it before a pass which `from` would have had; `from`
  // then unscales nothing.
  void take_over(PassEpilogue& from);

  // What multiplies the means of the pass that has begun last.
  float unscale() const;

  // Call for each bucket, in order. `parameters`: of the bucket, in any order. Throws if a needed set_unscale() is
  // missing.
  Task begin_bucket(size_t index, bool is_last, const std::vector<at::Tensor>& parameters);
  // Σg² of a bucket of that pass. Without it the bucket's gradients are read again when their norm is needed.
  void set_squares(int64_t pass, size_t index, double squares);
  // The last pass has written something else to a gradient of this bucket than the bucket's mean, or nothing.
  void forget_squares(size_t index);
  // Call when the pass has ended and its gradients are in place: changes are noticed from now on.
  void note_gradients();
  // Whether note_gradients() is needed.
  bool is_on() const;

  struct Squares {
    double sum = 0;
    std::vector<at::Tensor> others;  // parameters with a gradient that is not in `sum`
  };
  // Σg² of the gradients of `parameters`. `sum` has the buckets whose gradients are as the last pass has left them, and
  // which have no other parameters.
  Squares squares(const std::vector<at::Tensor>& parameters) const;
  // The factor that the means of the last pass were multiplied by; 1 if there was none, or after take_unscaled().
  float unscaled() const;
  float take_unscaled();
  // Those of all buckets of the last pass. Empty if want_squares() was not called before it.
  std::vector<at::Tensor> parameters() const;
  // Whether some gradient is still as the last pass has left it.
  bool has_unchanged() const;

 private:
  // Recognizes a gradient, and changes of it. The pointer is weak: it keeps the address from being used again.
  using WeakPtr = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Seen {
    WeakPtr gradient;
    uint32_t version = 0;
  };
  struct OfBucket {
    std::vector<at::Tensor> parameters;
    std::optional<double> squares;
    std::vector<std::optional<Seen>> seen;  // by parameter, null without a gradient; empty before note_gradients()

    // Whether parameter `i` has the gradient that note_gradients() has seen.
    bool is_unchanged(size_t i) const;
  };

  // What was asked for.
  struct Wanted {
    bool squares = false, in_unpack = false, requires_unscale = false;
    std::optional<float> next_unscale;
  };

  mutable std::mutex mutex_;  // guards the members below
  Wanted wanted_;
  float unscale_ = 1;   // of the pass under way
  float unscaled_ = 1;  // of the last pass that has ended
  int64_t pass_ = 0;
  std::vector<OfBucket> buckets_;  // of the last pass
};

}  // namespace fusedcomm
