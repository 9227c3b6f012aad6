// Serializes the structs that ranks send each other through the store: typed fields in a text with a checksum.
//
//   "<kind> <version> <checksum>\n", then each field as "<length>:<bytes>,"
//
// A struct to be serialized has a name, kKind, and lists its fields once:
//
//   template <typename Archive, typename Self>
//   static void fields(Archive& archive, Self& self) {
//     archive("step", self.step, Limits{0, kMaxCount});
//   }
//
// FieldWriter and FieldReader both walk that list, so they cannot disagree about the fields.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace fusedcomm {

// Raise this version when any struct's list of fields changes. All ranks of a job run the same
// fusedcomm (attach compares the versions), so a reader needs to understand only its own version.
inline constexpr int kFieldsVersion = 1;

// A text that cannot be decoded: it was cut off or garbled, or is of another kind or version.
class UnreadableError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The range of a field's values, both ends included.
struct Limits {
  int64_t least, most;
};

// Returns the text of `fields` with its header: kind, version and checksum.
std::string sealed(const std::string& kind, const std::string& fields);

class FieldWriter {
 public:
  void operator()(const char* name, int64_t value, Limits limits);
  void operator()(const char* name, bool value);
  void operator()(const char* name, double value);
  void operator()(const char* name, const std::string& value);
  void operator()(const char* name, const std::optional<std::string>& value);
  void operator()(const char* name, const std::set<std::string>& values);
  void operator()(const char* name, const std::map<std::string, int64_t>& values, Limits limits);
  // The third argument is the enum's last value. An enum's values count from 0.
  template <typename Enum, typename = std::enable_if_t<std::is_enum_v<Enum>>>
  void operator()(const char*, Enum value, Enum) {
    write(std::to_string(static_cast<int64_t>(value)));
  }

  const std::string& text() const { return text_; }

 private:
  void write(std::string_view bytes);
  std::string text_;
};

class FieldReader {
 public:
  // `text` must outlive the reader. All functions throw UnreadableError if the text is not as expected.
  FieldReader(const std::string& kind, const std::string& text);

  void operator()(const char* name, int64_t& value, Limits limits) { value = integer(name, limits); }
  void operator()(const char* name, bool& value) { value = integer(name, {0, 1}) == 1; }
  void operator()(const char* name, double& value);
  void operator()(const char* name, std::string& value) { value = read(name); }
  void operator()(const char* name, std::optional<std::string>& value);
  void operator()(const char* name, std::set<std::string>& values);
  void operator()(const char* name, std::map<std::string, int64_t>& values, Limits limits);
  template <typename Enum, typename = std::enable_if_t<std::is_enum_v<Enum>>>
  void operator()(const char* name, Enum& value, Enum last) {
    value = static_cast<Enum>(integer(name, {0, static_cast<int64_t>(last)}));
  }

  // Call after the last field. Throws if text is left.
  void finish() const;

 private:
  std::string_view read(const char* name);
  int64_t integer(const char* name, Limits limits);

  std::string_view rest_;
};

template <typename Struct>
std::string encode(const Struct& value) {
  FieldWriter writer;
  Struct::fields(writer, value);
  return sealed(Struct::kKind, writer.text());
}

// Throws UnreadableError.
template <typename Struct>
Struct decode(const std::string& text) {
  FieldReader reader(Struct::kKind, text);
  Struct value;
  Struct::fields(reader, value);
  reader.finish();
  return value;
}

}  // namespace fusedcomm
