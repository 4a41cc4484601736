#include "store/wire/bind.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "store/wire/parser.h"

namespace rpc_ext::store {

Problem problem_from(const py::tuple& of) {
  const auto kind = of[0].cast<int>();
  return {static_cast<Problem::Kind>(kind), of[1].cast<std::string>(),   of[2].cast<std::string>(),
          of[3].cast<std::int32_t>(),       of[4].cast<std::uint64_t>(), of[5].cast<std::uint64_t>(),
          of[6].cast<std::uint64_t>()};
}

namespace {

py::object text_of(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

py::tuple tuple_of(Verb verb, const KeyEntry& entry) {
  if (verb == Verb::fetch) return py::make_tuple(entry.sequence, entry.part);
  if (verb == Verb::get) {
    return py::make_tuple(entry.sequence, entry.after, entry.expires, entry.key, entry.needs_digest);
  }
  if (verb != Verb::put) return py::make_tuple(entry.sequence, entry.after, entry.expires, entry.key);
  return py::make_tuple(entry.sequence, entry.after, entry.expires, entry.key, entry.dtype,
                        py::tuple(py::cast(entry.sizes)), entry.nbytes, entry.part, entry.at, entry.length,
                        entry.digest);
}

KeyEntry entry_from(Verb verb, const py::tuple& of) {
  KeyEntry entry;
  entry.sequence = of[0].cast<std::uint64_t>();
  if (verb == Verb::fetch) {
    entry.part = of[1].cast<std::uint32_t>();
    return entry;
  }
  entry.after = of[1].cast<std::uint64_t>();
  entry.expires = of[2].cast<double>();
  entry.key = of[3].cast<std::string>();
  if (verb == Verb::get && of.size() > 4) entry.needs_digest = of[4].cast<bool>();
  if (verb != Verb::put) return entry;
  entry.dtype = of[4].cast<at::ScalarType>();
  entry.sizes = of[5].cast<std::vector<std::int64_t>>();
  entry.nbytes = of[6].cast<std::uint64_t>();
  entry.part = of[7].cast<std::uint32_t>();
  entry.at = of[8].cast<std::uint32_t>();
  entry.length = of[9].cast<std::uint32_t>();
  entry.digest = of[10].cast<std::uint64_t>();
  return entry;
}

py::tuple tuple_of(Verb verb, const Found& found) {
  if (verb == Verb::fetch) return py::make_tuple(found.at, found.length, found.digest);
  const py::object kept = found.has_kept ? py::object(py::make_tuple(found.kept, found.seed)) : py::none();
  return py::make_tuple(found.dtype, py::tuple(py::cast(found.sizes)), found.nbytes, found.at, found.length,
                        found.digest, kept);
}

Found found_from(Verb verb, const py::tuple& of) {
  Found found;
  const std::size_t first = verb == Verb::fetch ? 0 : 3;
  found.at = of[first].cast<std::uint32_t>();
  found.length = of[first + 1].cast<std::uint32_t>();
  found.digest = of[first + 2].cast<std::optional<std::uint64_t>>();
  if (verb == Verb::fetch) return found;
  found.dtype = of[0].cast<at::ScalarType>();
  found.sizes = of[1].cast<std::vector<std::int64_t>>();
  found.nbytes = of[2].cast<std::uint64_t>();
  if (const py::object kept = of[6]; !kept.is_none()) {
    found.has_kept = true;
    std::tie(found.kept, found.seed) = kept.cast<std::pair<std::uint64_t, std::uint64_t>>();
  }
  return found;
}

Verb verb_from(int number) {
  if (number < 1 || number > static_cast<int>(Verb::abandon)) throw std::invalid_argument("there is no such verb");
  return static_cast<Verb>(number);
}

py::tuple tuple_of(Packed&& message) {
  return py::make_tuple(py::bytes(message.body.data(), message.body.size()), py::cast(message.tensors));
}

}  // namespace

py::tuple to_python(const Problem& problem) {
  return py::make_tuple(static_cast<int>(problem.kind), text_of(problem.message), text_of(problem.path), problem.code,
                        problem.offset, problem.wanted, problem.got);
}

py::tuple to_python(const StoreRequest& request) {
  py::list entries;
  for (const KeyEntry& entry : request.entries) entries.append(tuple_of(request.verb, entry));
  return py::make_tuple(static_cast<int>(request.verb), py::bytes(request.token), request.sent, request.oldest,
                        request.service, entries, request.data);
}

namespace {

py::tuple pack_request_of(int verb, const std::string& token, double sent, std::uint64_t oldest,
                          const std::string& service, const py::sequence& entries, const at::Tensor& data) {
  StoreRequest request;
  request.verb = verb_from(verb);
  request.token = token;
  request.token.resize(kToken);
  request.sent = sent;
  request.oldest = oldest;
  request.service = service;
  for (const py::handle entry : entries) request.entries.push_back(entry_from(request.verb, entry.cast<py::tuple>()));
  request.data = data;
  return tuple_of(pack_request(request));
}

py::tuple pack_answer_of(int verb, std::size_t count, const py::sequence& errors, const py::sequence& entries,
                         const std::optional<at::Tensor>& data) {
  Errors problems;
  for (const py::handle error : errors) {
    const auto pair = error.cast<py::tuple>();
    problems.emplace_back(pair[0].cast<std::size_t>(), problem_from(pair[1].cast<py::tuple>()));
  }
  std::vector<Found> found;
  for (const py::handle entry : entries) found.push_back(found_from(verb_from(verb), entry.cast<py::tuple>()));
  return tuple_of(pack_answer("", count, problems, verb_from(verb), found, data ? *data : no_data()));
}

py::tuple parse_answer_of(int verb, std::size_t count, const py::bytes& body, const std::vector<at::Tensor>& tensors) {
  const Answer answer = parse_answer(verb_from(verb), count, std::string_view(body), tensors);
  py::list errors, entries;
  for (const auto& [index, problem] : answer.errors) errors.append(py::make_tuple(index, to_python(problem)));
  for (const Found& found : answer.entries) entries.append(tuple_of(verb_from(verb), found));
  return py::make_tuple(errors, entries, answer.data);
}

}  // namespace

void bind_messages(py::module_& m) {
  m.attr("STORE_VERSION") = kVersion;
  m.attr("PART") = kPart;
  m.attr("PACK") = kPack;
  m.attr("LARGE") = kLarge;
  m.attr("MOST_ENTRIES") = kMostEntries;
  m.attr("LONGEST_KEY") = kLongestKey;
  m.attr("TOKEN") = kToken;
  m.attr("LINE") = kLine;
  m.attr("INLINE") = kInline;
  m.attr("MOST_DIMENSIONS") = kMostDimensions;
  m.def("alone", alone, py::arg("data"), py::arg("at"), py::arg("length"));
  m.def("store_dtypes", [] { return py::cast(dtypes()); });
  m.def(
      "service_of", [](const py::bytes& body) { return std::string(service_of(std::string_view(body))); },
      py::arg("body"));
  m.def("pack_request", pack_request_of, py::arg("verb"), py::arg("token"), py::arg("sent"), py::arg("oldest"),
        py::arg("service"), py::arg("entries"), py::arg("data"));
  m.def(
      "parse_request",
      [](const py::bytes& body, const std::vector<at::Tensor>& tensors) {
        return to_python(parse_request(std::string_view(body), tensors));
      },
      py::arg("body"), py::arg("tensors"));
  m.def("pack_answer", pack_answer_of, py::arg("verb"), py::arg("count"), py::arg("errors"), py::arg("entries"),
        py::arg("data"));
  m.def("parse_answer", parse_answer_of, py::arg("verb"), py::arg("count"), py::arg("body"), py::arg("tensors"));
}

}  // namespace rpc_ext::store
