// Decorator of a job: takes the digest of a result that no message has.
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {

void digest_result(const std::shared_ptr<BucketJob>& job, const GradientsPtr& gradients) {
  job->after_unpack = [digest = job->digest, gradients, rest = std::move(job->after_unpack)] {
    for (const at::Tensor& tensor : gradients->tensors()) {
      digest->add_result(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    }
    if (rest) rest();
  };
}

}  // namespace fusedcomm
