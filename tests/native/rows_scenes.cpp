// The halves of a two-shot by themselves, on the CUDA path without a GPU: the owner's steps of an optimizer. Rows, the
// synchronizers, their engines, CudaDevice and StreamTransport are the product's, on what cuda_stress.cpp simulates.
//
//   compute stream: backward writes the rows of gradients ─┐                          ┌─ reads the rows of all ranks
//   owner's stream: waits, waits for the sums, steps its own row, sends it ───────────┘
//
// The owner's stream, and what waits for what, are those of fusedcomm/optimizer/owner.py. Elements are such that every
// wire of these scenes has the exact sums.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "gradients/rows.h"
#include "require.h"
#include "run_scene.h"
#include "sim_accelerator.h"
#include "sim_backend.h"
#include "sim_kernels.h"
#include "training.h"
#include "transport/c10d_transport.h"

using namespace fusedcomm;

namespace {

constexpr int kWorldSize = 2, kNumSteps = 5;
// By unit and piece: (number of elements of a row, number of the wire). Of several chunks, of one, and small ones.
const std::vector<std::vector<std::pair<int64_t, int>>> kUnits = {
    {{2850, 0}, {40, kExactWire}}, {{1250, 0}}, {{16, kExactWire}, {1500, 0}, {9, 0}}};

struct Setup {
  std::optional<ResidualFormat> feedback;
  bool overlaps = true;         // whether owners step on their stream, unit by unit; otherwise after the last unit
  bool has_own_stream = false;  // of the process groups
};

class Rank {
 public:
  // Call it on the rank's thread.
  Rank(const Setup& setup, sim::Groups& groups, int rank)
      : setup_(setup), rank_(rank), device_(sim::device(rank)), on_device_(device_), owners_(new_stream()) {
    const auto sums = make_synchronizer(groups, "sums", setup.feedback);
    const auto updates = make_synchronizer(groups, "updates", std::nullopt);
    for (size_t u = 0; u < kUnits.size(); ++u) units_.push_back(make_unit(u, sums, updates));
    for (int stream = 0; stream < kNumStreams; ++stream) {
      sim::set_pause(rank, stream, stream == rank % kNumStreams ? 400 : 40);
    }
  }

  void train() {
    for (int step = 0; step < kNumSteps; ++step) {
      std::vector<FuturePtr> sent(units_.size()), summed;
      for (size_t u = 0; u < units_.size(); ++u) {
        backward(step, u);
        summed.push_back(units_[u].sums->reduce_scatter(units_[u].rows, units_[u].sum, 1.0 / kWorldSize, call(step),
                                                        u + 1 == units_.size()));
        if (!setup_.overlaps) continue;
        after_compute();
        const c10::StreamGuard on_owners(owners_);
        sent[u] = step_unit(step, u, *summed[u]);
      }
      for (size_t u = 0; u < units_.size(); ++u) {
        if (!setup_.overlaps) sent[u] = step_unit(step, u, *summed[u]);
        sent[u]->waitAndThrow();
        apply(step, u);
      }
    }
  }

 private:
  static constexpr int kNumStreams = 8;  // the default one, the owner's, and those of two devices

  struct Unit {
    std::shared_ptr<Rows> sums, updates;
    at::Tensor rows, sum, owned;
  };

  static uint32_t call(int step) { return static_cast<uint32_t>(step); }
  static sim::Access access(const at::Tensor& tensor, bool writes) {
    return {tensor.data_ptr(), 0, 0, static_cast<int64_t>(tensor.nbytes()), writes};
  }
  // Of element i of all rows, in the steps up to this one.
  static float expected(int step, size_t u, size_t i) {
    float sum = 0;
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (int s = 0; s <= step; ++s) sum += training::gradient(rank, s, u, i) / kWorldSize;
    }
    return sum;
  }

  c10::Stream compute() const { return sim::current_stream(rank_); }
  c10::Stream new_stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_, 0); }

  std::shared_ptr<Synchronizer> make_synchronizer(sim::Groups& groups, const std::string& name,
                                                  std::optional<ResidualFormat> feedback) const {
    WireConfig config;
    config.wire = Wire::kBf16;
    config.sum = Sum::kTwoShot;
    config.feedback = feedback;
    config.max_chunk_nbytes = 4096;
    config.num_slots = 2;
    const auto cuda = sim::cuda_device(device_);
    const auto backend = sim::make_backend(groups.get(name, kWorldSize), rank_, kWorldSize, {setup_.has_own_stream});
    const auto transport = std::make_shared<StreamTransport>(backend, device_);
    return std::make_shared<Synchronizer>(std::make_shared<Engine>(config, cuda, transport), transport,
                                          std::vector<Parameters::Known>(), device_, Synchronizer::Options());
  }

  Unit make_unit(size_t u, const std::shared_ptr<Synchronizer>& sums,
                 const std::shared_ptr<Synchronizer>& updates) const {
    std::vector<Rows::Piece> pieces;
    std::vector<size_t> row;
    for (const auto& [numel, wire] : kUnits[u]) {
      row.push_back(pieces.size());
      pieces.push_back({"unit " + std::to_string(u) + " piece " + std::to_string(row.back()), numel, wire});
    }
    Unit unit{std::make_shared<Rows>(sums, u, pieces), std::make_shared<Rows>(updates, u, pieces), {}, {}, {}};
    unit.sums->set_row(row);
    unit.updates->set_row(row);
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device_);
    unit.rows = at::empty({kWorldSize * unit.sums->row_numel()}, options);
    unit.sum = at::empty({unit.sums->row_numel()}, options);
    unit.owned = at::empty({unit.sums->row_numel()}, options);
    sim::launch(compute(), "parameters", {access(unit.owned, true)},
                [owned = unit.owned] { std::fill_n(static_cast<float*>(owned.data_ptr()), owned.numel(), 0.0F); });
    return unit;
  }

  void after_compute() const {
    c10::Event event(device_.type());
    event.record(compute());
    event.block(owners_);
  }

  void backward(int step, size_t u) const {
    sim::launch(compute(), "backward", {access(units_[u].rows, true)}, [=, rank = rank_, rows = units_[u].rows] {
      auto* const data = static_cast<float*>(rows.data_ptr());
      for (int64_t i = 0; i < rows.numel(); ++i) data[i] = training::gradient(rank, step, u, static_cast<size_t>(i));
    });
  }

  // On the current stream: the optimizer's step, and what is sent of it.
  FuturePtr step_unit(int step, size_t u, at::ivalue::Future& summed) const {
    const Unit& unit = units_[u];
    summed.waitAndThrow();
    sim::launch(compute(), "owner's step", {access(unit.sum, false), access(unit.owned, true)},
                [sum = unit.sum, owned = unit.owned] {
                  const auto* const from = static_cast<const float*>(sum.data_ptr());
                  auto* const to = static_cast<float*>(owned.data_ptr());
                  for (int64_t i = 0; i < owned.numel(); ++i) to[i] += from[i];
                });
    return unit.updates->all_gather(unit.rows, unit.owned, call(step), u + 1 == units_.size());
  }

  void apply(int step, size_t u) const {
    sim::launch(compute(), "apply", {access(units_[u].rows, false)}, [=, rank = rank_, rows = units_[u].rows] {
      const auto* const data = static_cast<const float*>(rows.data_ptr());
      for (int64_t i = 0; i < rows.numel(); ++i) {
        const float right = expected(step, u, static_cast<size_t>(i));
        REQUIRE(std::fabs(data[i] - right) <= 1e-6F, "rank %d: step %d unit %zu element %ld: %g, not %g", rank, step, u,
                static_cast<long>(i), data[i], right);
      }
    });
  }

  const Setup setup_;
  const int rank_;
  const c10::Device device_;
  const c10::DeviceGuard on_device_;
  const c10::Stream owners_;
  std::vector<Unit> units_;
};

void owners() {
  for (const Setup& setup : {Setup{}, Setup{ResidualFormat::kFp32, true, true}, Setup{std::nullopt, false, false}}) {
    sim::Groups groups;
    std::vector<std::thread> threads;
    for (int index = 0; index < kWorldSize; ++index) {
      threads.emplace_back([&, index] {
        try {
          Rank rank(setup, groups, index);
          rank.train();
          c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1)->synchronizeDevice(sim::device(index).index());
        } catch (const std::exception& e) {
          REQUIRE(false, "rank %d: %s", index, e.what());
        }
      });
    }
    for (auto& thread : threads) thread.join();
    sim::reset();
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void run_rows(const char* wanted, uint64_t seed) {
  const std::map<std::string, void (*)()> scenes = {{"owners", owners}};
  REQUIRE(scenes.count(wanted) != 0, "there is no scene %s", wanted);
  sim::set_seed(seed);
  run_scene("rows_scenes", wanted, seed, scenes.at(wanted));
}
