// Runs the CUDA path without a GPU, from DDP's hook to the launches of kernels. The hook, the synchronizer, the engine,
// CudaDevice and StreamTransport are the product's. The accelerator is simulated (sim_accelerator.h), and so are
// torch's tensors on it (sim_torch.cpp), the driver and its kernels (sim_kernels.h) and the process group
// (sim_backend.h). Ranks are threads. The backward pass writes gradients on a compute stream, and the optimizer reads
// them there after the wait for the bucket's future.
//
// The program is a library, because its objects need Python's symbols: run(scene, seed) is called from Python.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "devices/cuda_device.h"
#include "frontends/ddp/hook.h"
#include "gradients/collective_calls.h"
#include "run_scene.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "sim_kernels.h"
#include "training.h"
#include "transport/c10d_transport.h"

using namespace fusedcomm;

namespace {

// A parameter's elements, and the number of its wire.
struct Shape {
  int64_t numel;
  int wire = 0;
};

struct Setup {
  WireConfig config;  // its ranks_per_host determines which ranks share a host
  int world_size = 2;
  std::vector<std::vector<Shape>> buckets = {
      {{5700}, {40, kExactWire}}, {{2500}}, {{700}}, {{64, kExactWire}, {3000}, {9}}};
  bool passes_float64 = false;  // whether one more bucket comes first, of float64
  bool are_apart = false;       // whether each gradient is a tensor of its own; otherwise they are DDP's buckets
  int64_t measure_every = 0;
  sim::BackendOptions backend;
};

// ---- one rank's training

class Rank {
 public:
  // Call it on the rank's thread.
  Rank(const Setup& setup, sim::Groups& groups, int rank)
      : setup_(setup), rank_(rank), device_(sim::device(rank)), on_device_(device_) {
    // Attaching may happen on another stream than training.
    const c10::Stream side = c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_, 0);
    make_parameters();
    const c10::StreamGuard on_side(side);
    cuda_ = sim::cuda_device(device_);
    cuda_->warm_up();
    const auto transport = make_transport(groups);
    hook_ = std::make_shared<Synchronizer>(std::make_shared<Engine>(setup.config, cuda_, transport), transport, known_,
                                           device_, Synchronizer::Options{0, setup.measure_every});
    switch_.set(hook_, nullptr);
    observer_ = std::make_shared<PassObserver>(cuda_, [] {});
    switch_.watch(observer_);
    for (int stream = 0; stream < kNumStreams; ++stream) {
      sim::set_pause(rank, stream, stream == rank % kNumStreams ? 400 : 40);
    }
  }

  // Enqueues a backward pass. The last bucket of the pass ends it.
  void backward(int step) {
    for (size_t b = 0; b < parameters_.size(); ++b) hand_over(step, b);
  }

  // Enqueues the waits for the buckets of the pass, and the optimizer.
  void take_results(int step) {
    for (size_t b = 0; b < handed_over_.size(); ++b) {
      handed_over_[b].future->waitAndThrow();
      size_t first = 0;
      for (const at::Tensor& gradients : handed_over_[b].tensors) {
        const auto numel = static_cast<size_t>(gradients.numel());
        sim::launch(compute(), "optimizer", {access(gradients, false)},
                    [=, this, data = gradients.data_ptr(), is_double = gradients.dtype() == at::kDouble] {
                      for (size_t i = 0; i < numel; ++i) {
                        const double value = is_double ? static_cast<double*>(data)[i] : static_cast<float*>(data)[i];
                        check(value, step, b, first + i);
                      }
                    });
        first += numel;
      }
    }
    handed_over_.clear();
  }

  // Drops the buckets without waiting for them, as after a backward pass that failed.
  void abandon() { handed_over_.clear(); }
  // Drops all that detaching drops.
  void detach() {
    switch_.set(nullptr, nullptr);
    switch_.watch(nullptr);
    observer_ = nullptr;
    hook_ = nullptr;
    cuda_ = nullptr;
  }

  c10::Stream compute() const { return sim::current_stream(rank_); }
  void synchronize() const { sim::synchronize(compute(), /*counts=*/false); }
  Synchronizer& hook() const { return *hook_; }
  CudaDevice& cuda() const { return *cuda_; }
  HookSwitch& hook_switch() { return switch_; }
  size_t num_buckets() const { return parameters_.size(); }

 private:
  static constexpr int kNumStreams = 5;  // the default one, the one of attaching, and the device's

  struct HandedOver {
    std::vector<at::Tensor> tensors;
    FuturePtr future;
  };

  static sim::Access access(const at::Tensor& tensor, bool writes) {
    return {tensor.data_ptr(), 0, 0, static_cast<int64_t>(tensor.nbytes()), writes};
  }

  void make_parameters() {
    const auto add = [this](const Shape& shape, at::ScalarType dtype) {
      const at::Tensor parameter = at::empty({shape.numel}, at::TensorOptions().dtype(dtype).device(device_));
      parameters_.back().push_back(parameter);
      known_.push_back({parameter, "parameter " + std::to_string(known_.size()), shape.wire});
    };
    if (setup_.passes_float64) {
      parameters_.emplace_back();
      add({500}, at::kDouble);
      add({20}, at::kDouble);
    }
    for (const auto& bucket : setup_.buckets) {
      parameters_.emplace_back();
      for (const Shape& shape : bucket) add(shape, at::kFloat);
    }
  }

  std::shared_ptr<C10dTransport> make_transport(sim::Groups& groups) {
    const int64_t ranks_per_host = setup_.config.ranks_per_host;
    const auto backend = [&](const std::string& name, int64_t rank, int64_t size) {
      return sim::make_backend(groups.get(name, size), static_cast<int>(rank), static_cast<int>(size), setup_.backend);
    };
    const auto transport = std::make_shared<StreamTransport>(backend("all", rank_, setup_.world_size), device_);
    if (ranks_per_host == 1) return transport;
    const Place place = training::place_of(rank_, setup_.world_size, ranks_per_host);
    const auto local = backend("host " + std::to_string(place.host), place.local_rank, ranks_per_host);
    const auto cross = backend("cross " + std::to_string(place.local_rank), place.host, place.num_hosts);
    return transport->with_hosts(place, {local, local, cross, cross});
  }

  // New gradients, which the backward pass writes. `first`: the first one's index in its bucket.
  at::Tensor make_gradients(int step, size_t b, size_t first, int64_t numel) const {
    const at::Tensor gradients = at::empty({numel}, parameters_[b][0].options());
    sim::launch(compute(), "backward", {access(gradients, true)},
                [=, rank = rank_, data = gradients.data_ptr(), is_double = gradients.dtype() == at::kDouble] {
                  for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
                    const float value = training::gradient(rank, step, b, first + i);
                    is_double ? static_cast<double*>(data)[i] = value : static_cast<float*>(data)[i] = value;
                  }
                });
    return gradients;
  }

  void hand_over(int step, size_t b) {
    const std::vector<at::Tensor>& parameters = parameters_[b];
    std::vector<at::Tensor> apart;
    std::vector<size_t> offsets, lengths;
    std::vector<c10::IntArrayRef> sizes;
    size_t numel = 0;
    for (const at::Tensor& parameter : parameters) {
      if (setup_.are_apart) apart.push_back(make_gradients(step, b, numel, parameter.numel()));
      offsets.push_back(numel);
      lengths.push_back(static_cast<size_t>(parameter.numel()));
      sizes.push_back(parameter.sizes());
      numel += lengths.back();
    }
    if (setup_.are_apart) {
      const Bucket bucket(b, b + 1 == parameters_.size(), parameters, std::make_shared<const Gradients>(apart));
      handed_over_.push_back({apart, hook_->run(bucket)});
      return;
    }
    const at::Tensor buffer = make_gradients(step, b, 0, static_cast<int64_t>(numel));
    c10d::GradBucket bucket(b, parameters_.size(), buffer, offsets, lengths, sizes, parameters, std::nullopt);
    handed_over_.push_back({{buffer}, switch_.run(bucket)});
  }

  // Called on a stream's thread. Gradients are such that every wire of these scenes has the exact mean.
  void check(double value, int step, size_t b, size_t i) const {
    double mean = 0;
    for (int rank = 0; rank < setup_.world_size; ++rank) {
      mean += training::gradient(rank, step, b, i) / setup_.world_size;
    }
    REQUIRE(std::fabs(value - mean) <= 1e-6, "rank %d: step %d bucket %zu element %zu: %g, not %g", rank_, step, b, i,
            value, mean);
  }

  const Setup setup_;
  const int rank_;
  const c10::Device device_;
  const c10::DeviceGuard on_device_;
  std::vector<std::vector<at::Tensor>> parameters_;  // by bucket
  std::vector<Parameters::Known> known_;
  std::shared_ptr<CudaDevice> cuda_;
  std::shared_ptr<Synchronizer> hook_;
  std::shared_ptr<PassObserver> observer_;
  HookSwitch switch_{nullptr};
  std::vector<HandedOver> handed_over_;  // of this pass
};

// Calls body(rank, index) on a thread for each rank. When it returns, all enqueued work has ended, unless the device
// `is_faulted`.
void with_ranks(const Setup& setup, const std::function<void(Rank&, int)>& body, bool is_faulted = false) {
  sim::Groups groups;
  std::vector<std::thread> threads;
  for (int index = 0; index < setup.world_size; ++index) {
    threads.emplace_back([&, index] {
      try {
        Rank rank(setup, groups, index);
        body(rank, index);
        if (is_faulted) return;
        c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->synchronizeDevice(sim::device(index).index());
      } catch (const std::exception& e) {
        REQUIRE(false, "rank %d: %s", index, e.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  sim::reset();
}

// ---- scenes

WireConfig wire_config(Wire wire, Sum sum, int64_t ranks_per_host = 1) {
  WireConfig config;
  config.ranks_per_host = ranks_per_host;
  config.wire = wire;
  config.sum = sum;
  config.max_chunk_nbytes = 4096;
  config.num_slots = 2;
  return config;
}

// Every kind of sum, with what may go along with it.
std::vector<Setup> setups() {
  std::vector<Setup> all;
  const auto add = [&all](const WireConfig& config) -> Setup& {
    all.emplace_back().config = config;
    all.back().world_size = 2 * static_cast<int>(config.ranks_per_host);
    return all.back();
  };
  add(wire_config(Wire::kBf16, Sum::kTwoShot)).passes_float64 = true;
  Setup& apart = add(wire_config(Wire::kBf16, Sum::kOneShot));
  apart.config.feedback = ResidualFormat::kFp32;
  apart.passes_float64 = apart.are_apart = true;
  Setup& exact = add(wire_config(Wire::kFp32, Sum::kExact));
  exact.passes_float64 = true;
  exact.backend.has_own_stream = true;
  Setup& checked = add(wire_config(Wire::kBf16, Sum::kTwoShot));
  checked.config.feedback = ResidualFormat::kFp32;
  checked.measure_every = 1;
  Setup& measured = add(wire_config(Wire::kBf16, Sum::kTwoShot));
  measured.measure_every = 1;
  measured.backend.has_own_stream = true;
  add(wire_config(Wire::kBf16, Sum::kTwoShot, 2)).measure_every = 2;
  return all;
}

// Training that waits for its buckets, and then looks at all that is counted and measured.
void training_steps() {
  for (const Setup& setup : setups()) {
    with_ranks(setup, [&](Rank& rank, int) {
      constexpr int kNumSteps = 5;
      for (int step = 0; step < kNumSteps; ++step) {
        rank.backward(step);
        rank.take_results(step);
      }
      REQUIRE(rank.hook().stats().num_nonfinite == 0, "non-finite elements were counted");
      rank.hook().settle();
      for (const auto& [name, measurement] : rank.hook().monitor().measurements()) {
        REQUIRE(measurement.error_norm.item<double>() == 0 && measurement.norm.item<double>() > 0,
                "%s has the error %g", name.c_str(), measurement.error_norm.item<double>());
      }
      rank.synchronize();
      const size_t num_ends = rank.hook_switch().take_pass_ends().size();
      REQUIRE(setup.are_apart || num_ends == kNumSteps, "%zu passes were observed", num_ends);
      rank.detach();
    });
  }
}

// Nobody waits for the last pass, and all is dropped while the streams still work.
void dropped() {
  for (const Setup& setup : setups()) {
    for (const bool detaches_first : {false, true}) {
      with_ranks(setup, [&](Rank& rank, int) {
        for (int step = 0; step < 2; ++step) {
          rank.backward(step);
          rank.take_results(step);
        }
        rank.backward(2);
        if (detaches_first) rank.detach();
        rank.abandon();
        if (!detaches_first) rank.detach();
      });
    }
  }
}

// What a training script may call after a backward pass, without having waited for its buckets.
void calls() {
  Setup setup;
  setup.config = wire_config(Wire::kBf16, Sum::kTwoShot);
  setup.measure_every = 1;
  with_ranks(setup, [&](Rank& rank, int index) {
    for (int step = 0; step < 6; ++step) {
      rank.backward(step);
      if (step % 2 == 0) {
        REQUIRE(rank.hook().stats().num_nonfinite == 0, "non-finite elements were counted");
      } else {
        rank.hook().settle();
        for (const auto& [name, measurement] : rank.hook().monitor().measurements()) {
          REQUIRE(measurement.error_norm.item<double>() == 0, "%s has an error", name.c_str());
        }
      }
      rank.take_results(step);
      const double largest = max_over_ranks(rank.hook(), index + step, "a call of this scene");
      REQUIRE(largest == step + 1, "the largest value is %g", largest);
    }
  });
}

// Each call to the device fails once in max_over_ranks(), on all ranks. Its memory may still be under way then.
void failing_calls() {
  Setup setup;
  setup.config = wire_config(Wire::kBf16, Sum::kTwoShot);
  int64_t num_calls = 0;
  for (int64_t failing = 0; failing <= num_calls; ++failing) {
    with_ranks(setup, [&](Rank& rank, int index) {
      sim::fail_call(index, failing);
      const sim::CountCalls counted(true);
      bool failed = false;
      try {
        max_over_ranks(rank.hook(), 1, "a call of this scene");
      } catch (const std::exception&) {
        failed = true;
      }
      REQUIRE(failed == (failing != 0), "call %ld fails, and max_over_ranks() %s", static_cast<long>(failing),
              failed ? "throws" : "does not throw");
      if (failing == 0 && index == 0) num_calls = sim::num_calls(index);
    });
  }
  REQUIRE(num_calls > 3, "only %ld calls", static_cast<long>(num_calls));
}

// A kernel that fails on this device is found before training.
void warm_up() {
  Setup setup;
  setup.world_size = 1;
  with_ranks(
      setup,
      [](Rank& rank, int) {
        sim::fail_kernels(true);
        bool failed = false;
        try {
          rank.cuda().warm_up();
        } catch (const std::exception&) {
          failed = true;
        }
        sim::fail_kernels(false);
        REQUIRE(failed, "warm_up() does not notice that a kernel fails");
      },
      /*is_faulted=*/true);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void run(const char* wanted, uint64_t seed) {
  const std::map<std::string, void (*)()> scenes = {{"training_steps", training_steps},
                                                    {"dropped", dropped},
                                                    {"calls", calls},
                                                    {"failing_calls", failing_calls},
                                                    {"warm_up", warm_up}};
  REQUIRE(scenes.count(wanted) != 0, "there is no scene %s", wanted);
  sim::set_seed(seed);
  run_scene("cuda_stress", wanted, seed, scenes.at(wanted));
}
