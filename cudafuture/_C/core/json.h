// A writer of JSON text, for what the core tells other processes.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cudafuture {

// Calls follow the text from left to right; each value follows its key, or the values before it in an array.
class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(std::string_view name) {
    separate();
    quote(name);
    text_ += ':';
    needs_comma_ = false;
    return *this;
  }

  JsonWriter& value(std::string_view text) {
    separate();
    quote(text);
    return *this;
  }
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(const std::string& text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag) { return literal(flag ? "true" : "false"); }
  JsonWriter& value(std::int64_t number) { return literal(std::to_string(number)); }
  JsonWriter& value(double number) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, number);  // in no locale; the numbers here are finite
    return literal({text, static_cast<std::size_t>(end.ptr - text)});
  }
  JsonWriter& values(const std::vector<std::uint32_t>& numbers) {
    begin_array();
    for (const std::uint32_t number : numbers) value(static_cast<std::int64_t>(number));
    return end_array();
  }

  std::string take() { return std::move(text_); }

 private:
  JsonWriter& open(char bracket) {
    separate();
    text_ += bracket;
    needs_comma_ = false;
    return *this;
  }
  JsonWriter& close(char bracket) {
    text_ += bracket;
    needs_comma_ = true;
    return *this;
  }
  JsonWriter& literal(std::string_view text) {
    separate();
    text_ += text;
    return *this;
  }
  void separate() {
    if (needs_comma_) text_ += ',';
    needs_comma_ = true;
  }
  void quote(std::string_view text) {
    text_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
        text_ += escaped;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  bool needs_comma_ = false;
};

}  // namespace cudafuture
