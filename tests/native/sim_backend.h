// A c10d backend on the simulated accelerator. Ranks are threads. Like NCCL's, a collective runs on the current stream
// and waits there for the other ranks, unless the caller asks for one that is asynchronous.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// Where the ranks of a group meet.
class Group;
std::shared_ptr<Group> make_group(int size);

struct BackendOptions {
  // Every collective runs on a stream of the backend's own and returns a Work.
  bool has_own_stream = false;
};
c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<Group> group, int rank, int size,
                                               BackendOptions options);

}  // namespace sim
