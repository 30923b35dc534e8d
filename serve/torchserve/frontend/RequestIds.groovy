import groovy.transform.CompileStatic
import groovy.transform.TupleConstructor
import io.netty.channel.Channel
import io.netty.handler.codec.http.HttpRequest
import io.netty.handler.codec.http.HttpResponse
import java.util.regex.Pattern
import org.pytorch.serve.http.Session
import org.slf4j.Logger
import org.slf4j.LoggerFactory

/**
 * Of one connection: what clients call their requests, for the answers and the access log to say. TorchServe (0.12) gives
 * each request an id of its own, which stays the one that workers get: they could not tell two requests apart that are
 * called alike. Its own line of a request has neither the client's id nor the status that `Answers` makes of an answer.
 */
@CompileStatic
class RequestIds {
    private static final String HEADER = 'x-request-id'
    private static final String OURS = ''
    private static final Pattern TAKEN = Pattern.compile('[!-~]{1,128}')  // as serve/runtime/service/observation.py
    private static final int UNANSWERED = 499  // as nginx says it, and serve/asgi/http/application.py
    private static final Logger LOG = LoggerFactory.getLogger('serve.access')

    @TupleConstructor
    private static class Asked {
        String id
        Session session  // what TorchServe's own line of it says; null where no lines are written
    }

    private final Deque<Asked> owed = new ArrayDeque<>()  // the requests that TorchServe is to answer, in their order
    private Asked present = null

    /** A request's header is there. */
    void come(Channel channel, HttpRequest request) {
        String given = request.headers().get(HEADER)
        present = new Asked(
                given != null && TAKEN.matcher(given).matches() ? given : OURS,
                LOG.isInfoEnabled() ? new Session(String.valueOf(channel.remoteAddress()), request) : null)
    }

    /** TorchServe gets the present request. */
    void owe() {
        owed.add(present)
    }

    /** Name TorchServe's answer to the first request that it has not answered, and log that. */
    void answer(HttpResponse answer) {
        Asked asked = owed.poll()
        log(asked, answer.status().code(), name(answer, asked))
    }

    /** Name an answer that is given to the present request in TorchServe's place, and log it where that is wanted. */
    void refuse(HttpResponse answer, boolean logged) {
        owed.removeLastOccurrence(present)  // TorchServe has a part of it, and will get no more
        String id = name(answer, present)
        if (logged) {
            log(present, answer.status().code(), id)
        }
    }

    /** The connection has ended: log the requests that were not answered. */
    void end() {
        while (!owed.isEmpty()) {
            Asked asked = owed.poll()
            log(asked, UNANSWERED, asked.id ?: '-')
        }
    }

    private static String name(HttpResponse answer, Asked asked) {
        if (asked != null && asked.id != OURS) {
            answer.headers().set(HEADER, asked.id)
        } else if (!answer.headers().contains(HEADER)) {
            answer.headers().set(HEADER, UUID.randomUUID().toString())
        }
        return answer.headers().get(HEADER)
    }

    private static void log(Asked asked, int status, String id) {
        if (asked?.session != null) {
            asked.session.setCode(status)
            LOG.info('{} {}', asked.session, id)
        }
    }
}
