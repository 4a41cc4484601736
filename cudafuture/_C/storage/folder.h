// What a folder needs beside files.
#pragma once

#include <string>
#include <vector>

namespace cudafuture::storage {

// Has the names in a folder survive a crash. Throws Failure.
void sync_folder(const std::string& path);

void write_file(const std::string& path, const std::string& content);  // a new one, synced; throws Failure

std::vector<std::string> names_in(const std::string& path);  // of what is in a folder; throws Failure

}  // namespace cudafuture::storage
