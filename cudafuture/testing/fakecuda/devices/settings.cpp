#include "fakecuda/devices/settings.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace fakecuda {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* const value = getenv(name);
  return value == nullptr || *value == 0 ? otherwise : value;
}

[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
  fprintf(stderr, "fakecuda: %s is '%s'; set it to %s\n", name, value.c_str(), expected);
  _Exit(2);
}

double number(const char* name, const char* otherwise, double least, double most) {
  const std::string value = variable(name, otherwise);
  char* end = nullptr;
  const double found = strtod(value.c_str(), &end);
  if (*end == 0 && found >= least && found <= most) return found;
  const std::string expected =
      "a number from " + std::to_string(static_cast<long>(least)) + " to " + std::to_string(static_cast<long>(most));
  refuse(name, value, expected.c_str());
}

CudaSchedule schedule() {
  const std::string value = variable("FAKECUDA_SCHEDULE", "lazy");
  if (value == "eager") return CudaSchedule::kEager;
  if (value == "jitter") return CudaSchedule::kJitter;
  if (value == "lazy") return CudaSchedule::kLazy;
  refuse("FAKECUDA_SCHEDULE", value, "eager, jitter or lazy");
}

}  // namespace

CudaSettings CudaSettings::of_environment() {
  CudaSettings settings;
  settings.schedule = fakecuda::schedule();
  settings.delay_ms = number("FAKECUDA_DELAY_MS", settings.schedule == CudaSchedule::kJitter ? "2" : "50", 0, 1e6);
  settings.seed = static_cast<uint64_t>(number("FAKECUDA_SEED", "1", 0, 1e15));
  settings.devices = static_cast<int>(number("FAKECUDA_DEVICES", "2", 0, 64));
  settings.memory = static_cast<size_t>(number("FAKECUDA_MEMORY", "4096", 1, 1e9)) << 20;
  settings.detect_races = variable("FAKECUDA_RACES", "0") != "0";
  settings.verbose = variable("FAKECUDA_VERBOSE", "0") != "0";
  return settings;
}

}  // namespace fakecuda
