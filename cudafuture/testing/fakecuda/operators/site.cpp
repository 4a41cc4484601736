#include "fakecuda/operators/site.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fakecuda/control/control.h"
#include "machine/site.h"

namespace fakecuda {
namespace {

using Traceback = torch::CapturedTraceback;
using PythonFrames = std::vector<Traceback::PyFrame>;

// torch shows the frames of a traceback only as text, and making the text needs Python's lock. An explicit
// instantiation of a template may name private members, so this one gives access to the frames.
const PythonFrames& frames_of(const Traceback& traceback);
template <PythonFrames Traceback::* frames>
struct FrameAccess {
  friend const PythonFrames& frames_of(const Traceback& traceback) { return traceback.*frames; }
};
template struct FrameAccess<&Traceback::frames_>;

// A call of the host with its stack of Python, which is turned into text only for a report.
class PythonSite : public machine::Site {
 public:
  explicit PythonSite(const char* operation)
      : operation_(operation), traceback_(Traceback::gather(true, false, false)) {
    machine::StackPlace place;
    for (const Traceback::PyFrame& frame : frames_of(*traceback_)) place.add_frame(frame.code, frame.lasti);
    place_ = place.of(operation_);
  }

  std::string operation() const override { return operation_; }
  std::uint64_t place() const noexcept override { return place_; }

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
  std::shared_ptr<Traceback> traceback_;
  std::uint64_t place_ = 0;
};

machine::SitePtr make_site(const char* operation) { return std::make_shared<PythonSite>(operation); }

}  // namespace

void install_sites() { fakecuda_set_race_sites(&make_site); }

}  // namespace fakecuda
