// The messages between rank 0, which decides what is done next, and the ranks. Uses no torch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "frontends/horovod/bytes.h"
#include "frontends/horovod/signature.h"

namespace fusedcomm::horovod {

enum class MessageType : uint8_t {
  // To rank 0.
  kReady,    // Ready: requests that this rank has submitted
  kLeaving,  // text: this rank ends the communication of all, and why
  // From rank 0.
  kExecute,  // Execute: collectives that every member issues now, in this order
  kEnd,      // text: nothing more is issued, and why
};

// The number of a signature that all ranks know; see Negotiator.
using Id = uint32_t;
inline constexpr Id kNoId = UINT32_MAX;

struct Ready {
  struct Entry {
    Id id = kNoId;
    Signature signature;  // if there is no id
  };
  int32_t set = 0;
  std::vector<Entry> entries;

  std::string message() const;
  static Ready read(Reader& in);
};

// One collective, or its failure.
struct Response {
  struct Entry {
    Id id = kNoId;
    bool is_new = false;  // whether the signature follows, also with an id
    Signature signature;
    // For each member: rows of each tensor (allgather), or rows to each member (alltoall). Empty for other kinds.
    std::vector<std::vector<int64_t>> of_members;
  };
  std::string error;   // empty: the collective takes place. Else there is one entry
  int32_t number = 0;  // join: the rank that joined last
  std::vector<Entry> entries;
};

struct Execute {
  int32_t set = 0;
  std::vector<Response> responses;

  std::string message() const;
  static Execute read(Reader& in);
};

std::string text_message(MessageType type, const std::string& text);

}  // namespace fusedcomm::horovod
