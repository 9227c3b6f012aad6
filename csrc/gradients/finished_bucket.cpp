// Decorator of a job: adds up the squares of its means, and takes a loss scale out of them.
#include <numeric>
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {

void finish(const std::shared_ptr<BucketJob>& job, const GradientsPtr& gradients, size_t index,
            const PassEpilogue::Task& task, Device* device, PassEpilogue* epilogue) {
  const bool sums_squares = task.sums_squares && device->has_epilogue();
  if (job->plan->unpacks()) {
    job->unscale = task.unscale;
    if (sums_squares) job->squares.resize(job->payloads.size() * static_cast<size_t>(job->num_chunks()));
  } else if (device->has_epilogue()) {
    if (sums_squares) job->squares.resize(job->payloads.size());
    // The job owns the function.
    job->after_unpack = [device, own = job.get(), unscale = task.unscale] {
      for (size_t i = 0; i < own->payloads.size(); ++i) {
        double* const squares = own->squares.empty() ? nullptr : &own->squares[i];
        device->finish_in_place(own->payloads[i].slices, {unscale, squares});
      }
    };
  } else if (task.unscale != 1) {
    job->after_unpack = [gradients, unscale = task.unscale] { gradients->scale(unscale); };
  }
  if (!sums_squares) return;
  job->on_done = [epilogue, own = job.get(), index, pass = task.pass,
                  on_done = std::move(job->on_done)](std::exception_ptr error) {
    epilogue->set_squares(pass, index, std::accumulate(own->squares.begin(), own->squares.end(), 0.0));
    on_done(std::move(error));
  };
}

}  // namespace fusedcomm
