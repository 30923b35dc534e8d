import groovy.transform.CompileStatic
import io.netty.handler.codec.http.HttpRequest
import io.netty.handler.codec.http.HttpResponse
import java.util.regex.Pattern

/**
 * Of one connection: what clients call their requests, for the answers to say. TorchServe (0.12) gives each request an id
 * of its own, which stays the one that workers get: they could not tell two requests apart that are called alike.
 */
@CompileStatic
class RequestIds {
    private static final String HEADER = 'x-request-id'
    private static final String OURS = ''
    private static final Pattern TAKEN = Pattern.compile('[!-~]{1,128}')  // as serve/runtime/observing.py

    private final Deque<String> owed = new ArrayDeque<>()  // of the requests that TorchServe is to answer, in their order
    private String present = OURS

    /** A request's header is there. */
    void come(HttpRequest request) {
        String given = request.headers().get(HEADER)
        present = given != null && TAKEN.matcher(given).matches() ? given : OURS
    }

    /** TorchServe gets the present request. */
    void owe() {
        owed.add(present)
    }

    /** Name TorchServe's answer to the first request that it has not answered. */
    void answer(HttpResponse answer) {
        name(answer, owed.poll() ?: OURS)
    }

    /** Name an answer that is given to the present request in TorchServe's place. */
    void refuse(HttpResponse answer) {
        name(answer, present)
    }

    private static void name(HttpResponse answer, String id) {
        if (id != OURS) {
            answer.headers().set(HEADER, id)
        } else if (!answer.headers().contains(HEADER)) {
            answer.headers().set(HEADER, UUID.randomUUID().toString())
        }
    }
}
