// Reads one chunked HTTP/1.1 answer that is a stream of server-sent events, in whatever pieces it arrives.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

class SseReader {
   public:
    void reset() { *this = SseReader(); }

    // Takes what has arrived. Returns what is wrong with it, or nullptr.
    const char* feed(std::string_view data) {
        while (!data.empty()) {
            if (state_ == State::kDone) return "there are bytes after the answer";
            if (state_ == State::kChunk) {
                take_body(data.substr(0, std::min(left_, data.size())));
                const size_t taken = std::min(left_, data.size());
                data.remove_prefix(taken);
                left_ -= taken;
                if (left_ == 0) state_ = State::kChunkEnd;
                continue;
            }
            const size_t end = data.find('\n');
            line_.append(data.substr(0, end));
            if (end == std::string_view::npos) return nullptr;
            data.remove_prefix(end + 1);
            if (!line_.empty() && line_.back() == '\r') line_.pop_back();
            if (const char* problem = take_line(); problem != nullptr) return problem;
            line_.clear();
        }
        return nullptr;
    }

    bool begun() const { return begun_; }          // the first byte of the body is here
    bool done() const { return state_ == State::kDone; }  // the answer is complete
    bool closes() const { return closes_; }        // the server takes no further request on this connection
    bool said_done() const { return said_done_; }  // its last event was [DONE]
    int events() const { return events_; }         // before [DONE]
    std::string excerpt() const { return line_.substr(0, 400) + event_.substr(0, 400); }

   private:
    enum class State { kStatus, kHeader, kChunkSize, kChunk, kChunkEnd, kTrailer, kDone };

    const char* take_line() {
        switch (state_) {
            case State::kStatus:
                if (line_.size() < 12 || line_.compare(8, 4, " 200") != 0) return "the status is not 200";
                state_ = State::kHeader;
                return nullptr;
            case State::kHeader:
                if (line_.empty()) {
                    if (!chunked_) return "the answer is not chunked";
                    state_ = State::kChunkSize;
                }
                std::transform(line_.begin(), line_.end(), line_.begin(), [](unsigned char c) { return std::tolower(c); });
                if (line_.rfind("transfer-encoding:", 0) == 0 && line_.find("chunked") != std::string::npos) chunked_ = true;
                if (line_.rfind("connection:", 0) == 0 && line_.find("close") != std::string::npos) closes_ = true;
                return nullptr;
            case State::kChunkSize:
                left_ = std::strtoul(line_.c_str(), nullptr, 16);
                state_ = left_ == 0 ? State::kTrailer : State::kChunk;
                return nullptr;
            case State::kChunkEnd:
                state_ = State::kChunkSize;
                return line_.empty() ? nullptr : "a chunk is longer than it said";
            case State::kTrailer:
                if (line_.empty()) state_ = State::kDone;
                return nullptr;
            default:
                return "a line where none can be";
        }
    }

    // Counts lines that begin with "data:"; an event has one of them, as every OpenAI server writes them.
    void take_body(std::string_view piece) {
        begun_ = begun_ || !piece.empty();
        while (!piece.empty()) {
            const size_t end = piece.find('\n');
            if (event_.size() < 400) event_.append(piece.substr(0, end));
            if (end == std::string_view::npos) return;
            piece.remove_prefix(end + 1);
            if (event_.rfind("data: [DONE]", 0) == 0) {
                said_done_ = true;
            } else if (event_.rfind("data:", 0) == 0) {
                events_++;
                said_done_ = false;
            }
            event_.clear();
        }
    }

    State state_ = State::kStatus;
    size_t left_ = 0;  // of the chunk
    int events_ = 0;
    bool chunked_ = false, closes_ = false, begun_ = false, said_done_ = false;
    std::string line_, event_;
};
