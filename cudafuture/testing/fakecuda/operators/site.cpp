#include "fakecuda/operators/site.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "machine/site.h"

extern "C" void fakecuda_set_race_sites(machine::SitePtr (*make_site)(const char* operation));

namespace fakecuda {
namespace {

// A call of the host with its stack of Python, which is turned into text only for a report.
class PythonSite : public machine::Site {
 public:
  explicit PythonSite(const char* operation)
      : operation_(operation), traceback_(torch::CapturedTraceback::gather(true, false, false)) {}

  std::string operation() const override { return operation_; }

  std::string stack() const override {
    const torch::SymbolizedTracebacks symbolized = torch::symbolize({traceback_.get()});
    std::string text;
    const auto& frames = symbolized.tracebacks.at(0);
    for (auto index = frames.rbegin(); index != frames.rend(); ++index) {
      const auto& frame = symbolized.all_frames.at(*index);
      text += frame.filename + ":" + std::to_string(frame.lineno) + " in " + frame.funcname + "\n";
    }
    return text;
  }

 private:
  std::string operation_;
  std::shared_ptr<torch::CapturedTraceback> traceback_;
};

machine::SitePtr make_site(const char* operation) { return std::make_shared<PythonSite>(operation); }

}  // namespace

void install_sites() { fakecuda_set_race_sites(&make_site); }

}  // namespace fakecuda
