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
  kDeviate,  // Deviate: this rank cannot follow the plan
  kStopped,  // Stopped: the answer to kStop
  kLeaving,  // text: this rank ends the communication of all, and why
  // From rank 0.
  kExecute,  // Execute: collectives that every member issues now, in this order
  kPlan,     // Plan: buckets that members issue by themselves, again and again
  kStop,     // Stop: no further bucket of the plan may be issued
  kResume,   // Resume: the plan has ended
  kEnd,      // text: nothing more is issued, and why
};

// The number of a signature that all ranks know; see Negotiator.
using Id = uint32_t;
inline constexpr Id kNoId = UINT32_MAX;

// `epoch` counts how often a set has begun or ended a plan. What a rank has reported in an earlier one is void.
struct Ready {
  struct Entry {
    Id id = kNoId;
    bool after_wait = false;  // whether this rank's caller has waited for a result since it submitted something before
    Signature signature;      // if there is no id
  };
  int32_t set = 0;
  uint32_t epoch = 0;
  std::vector<Entry> entries;

  std::string message() const;
  static Ready read(Reader& in);
};

struct Deviate {
  int32_t set = 0;
  uint32_t epoch = 0;
  std::vector<Id> missing;  // members of the next bucket that this rank cannot submit while its caller waits

  std::string message() const;
  static Deviate read(Reader& in);
};

struct Stopped {
  int32_t set = 0;
  uint32_t epoch = 0;
  int64_t num_issued = 0;  // buckets of the plan

  std::string message() const;
  static Stopped read(Reader& in);
};

// One collective, or its failure.
struct Response {
  struct Entry {
    Id id = kNoId;
    bool is_new = false;  // whether the signature follows, also with an id
    Signature signature;
    // By member: allgather: rows of each tensor; alltoall: rows to each member. Else empty.
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

struct Plan {
  int32_t set = 0;
  uint32_t epoch = 0;
  std::vector<std::vector<Id>> buckets;

  std::string message() const;
  static Plan read(Reader& in);
};

struct Stop {
  int32_t set = 0;
  uint32_t epoch = 0;

  std::string message() const;
  static Stop read(Reader& in);
};

// Buckets of the plan are counted from its begin. [0, num_valid): every rank has sent its values. [num_valid,
// num_entered): void, because some ranks have sent zeros.
struct Resume {
  int32_t set = 0;
  uint32_t epoch = 0;
  int64_t num_valid = 0, num_entered = 0;

  std::string message() const;
  static Resume read(Reader& in);
};

std::string text_message(MessageType type, const std::string& text);

}  // namespace fusedcomm::horovod
